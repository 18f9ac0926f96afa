"""Which pair and configuration a command decodes with: a file's, a sweep's, or the champion's."""

from __future__ import annotations

import re
from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, Value, load_yaml, parse
from specdec_core.search.folder import find_trial

ID = re.compile("[0-9a-f]{2,10}")  # the beginning of one


class Choice(Value):
    """A pair and the configuration to decode with, as in a YAML file for `--config`."""

    pair: PairSpec = PairSpec()
    configuration: Configuration


def choose(config: Path | None) -> tuple[Choice, str]:
    """What `config` says (:func:`read_choice`), or else the champion; and in words where it is
    from.

    Raises:
        UserError: as :func:`read_choice` does, or no champion was promoted yet.
    """
    if config is not None:
        return read_choice(config)
    from dashboards.tracking.registry import load_champion  # MLflow takes seconds to import

    pair, configuration, version = load_champion()
    return Choice(pair=pair, configuration=configuration), f"champion, version {version}"


def read_choice(config: Path) -> tuple[Choice, str]:
    """The choice in a YAML file, or the configuration whose id begins so, with the pair of the
    latest finished sweep that has it; and in words where it is from.

    Raises:
        UserError: the file is missing or wrong, or not exactly one id begins so.
    """
    if config.exists() or not ID.fullmatch(str(config)):
        return parse(Choice, load_yaml(config), str(config)), str(config)
    try:
        result, trial = find_trial(workspace() / "sweeps", str(config))
    except UserError as error:
        raise UserError(
            f"--config {config}: no such file, and as the beginning of an id: {error}"
        ) from None
    choice = Choice(pair=result.pair, configuration=trial.configuration)
    return choice, f"{trial.id} of sweep {result.name}"
