"""What configurations do, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dashboards.sections import Section
from specdec_core.config import Configuration, DrafterSettings, distinct_labels
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.search.load.measures import LoadMeasures
from specdec_core.search.load.workload import Slo


def sentences(
    named: Iterable[tuple[str, Configuration]], title: str = "What they do", **more: Any
) -> Section:
    """A line for each configuration: its name and its sentence. Below a bandit, a line for each of
    its arms that has none yet; `more` are fields of the section."""
    return Section(key="sentences", title=title, lines=list(_lines(dict.fromkeys(named))), **more)


def _lines(named: Iterable[tuple[str, Configuration]]) -> Iterator[str]:
    named = list(named)
    described: set[DrafterSettings | None] = {configuration.drafter for _, configuration in named}
    for name, configuration in named:
        yield f"{name}: {configuration.sentence}"
        for part in configuration.parts:
            arms = part.arms if isinstance(part, BanditSettings) else ()
            for label, arm in zip(distinct_labels(arms).values(), arms, strict=True):
                if arm not in described:
                    described.add(arm)
                    yield f"arm {label}: {arm.sentence}"


def limited(measures: LoadMeasures, slo: Slo | None) -> str:
    """What an objective limits, as requests experience it. Answers of one token have no TPOT."""
    names = (name for name in (slo.limits if slo else ()) if getattr(measures, name))
    values = (f"{name} {1e3 * measures.value(name, 95):.0f} ms" for name in names)
    return f"95th percentile: {', '.join(values)}"


def tooltip(configuration: Configuration) -> str:
    """A configuration in words and as YAML, as plain text."""
    return f"{configuration.sentence}\n\n{configuration.to_yaml()}"


def note(configuration: Configuration) -> str:
    """A configuration in words and as YAML, in Markdown."""
    return f"{configuration.sentence}\n\n```yaml\n{configuration.to_yaml()}```"
