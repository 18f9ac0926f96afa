"""Which pair and configuration a command decodes with: a file's, a sweep's, or the champion's."""

from __future__ import annotations

import re
from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairConfiguration
from specdec_core.search.folder import find_trial

ID = re.compile("[0-9a-f]{2,10}")  # an id or its beginning


def choose(
    config: Path | None, engine: str | None = None
) -> tuple[PairConfiguration, str, int | None]:
    """What `config` names (:func:`read_config`), else the champion, in this library's engine or in
    another server, `engine`; where it comes from, in words; and the registered version, if it is
    one.

    Raises:
        UserError: as :func:`read_config` does, or no champion was promoted yet.
    """
    if config is not None:
        return *read_config(config), None
    from dashboards.tracking.registry import load_champion  # MLflow takes seconds to import

    pair, configuration, version = load_champion(engine)
    chosen = PairConfiguration(pair=pair, configuration=configuration)
    where = "" if engine is None else f" for {engine}"
    return chosen, f"champion{where}, version {version}", version


def read_config(config: Path, check: bool = True) -> tuple[PairConfiguration, str]:
    """The pair and configuration in a YAML file; or the configuration with an id that begins with
    `config`, with the pair of the latest finished sweep that has it. And where that comes from, in
    words. Without `check` the pair may lack a draft model: options will name it.

    Raises:
        UserError: the file is missing or wrong, or not exactly one id begins like that.
    """
    if config.exists() or not ID.fullmatch(str(config)):
        return PairConfiguration.load(config, check), str(config)
    try:
        result, trial = find_trial(workspace() / "sweeps", str(config))
    except UserError as error:
        raise UserError(
            f"--config {config}: no such file, and as the beginning of an id: {error}"
        ) from None
    chosen = PairConfiguration(pair=result.pair, configuration=trial.configuration)
    return chosen, f"{trial.id} of sweep {result.name}"
