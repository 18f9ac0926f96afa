"""Which pair and configuration a command decodes with: a file's, or the champion's."""

from __future__ import annotations

from pathlib import Path

from specdec_core.config import Configuration, PairSpec, Value, load_yaml, parse


class Choice(Value):
    """A pair and the configuration to decode with, as in a YAML file for `--config`."""

    pair: PairSpec = PairSpec()
    configuration: Configuration


def choose(config: Path | None) -> tuple[Choice, str]:
    """The choice in the file `config`, or else the champion; and in words where it is from.

    Raises:
        UserError: the file is missing or wrong, or no champion was promoted yet.
    """
    if config is not None:
        return parse(Choice, load_yaml(config), str(config)), str(config)
    from dashboards.tracking.registry import load_champion  # MLflow takes seconds to import

    pair, configuration, version = load_champion()
    return Choice(pair=pair, configuration=configuration), f"champion, version {version}"
