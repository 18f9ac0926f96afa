"""What configurations that are shown together are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from specdec_core.config.base import identity
from specdec_core.config.configuration import Configuration
from specdec_core.config.drafters import DrafterSettings

SHORTEST = 4  # characters of an id that are shown


def distinct_labels(shown: Iterable[Configuration | DrafterSettings]) -> dict[str, str]:
    """A label for each id, no two alike: those with the same label get as many first characters of
    their ids as tell them apart. The sampling is left out where all have the same."""
    each = {identity(own): own for own in shown}
    samplings = {own.sampling for own in each.values() if isinstance(own, Configuration)}
    labels = {
        key: own.label
        if isinstance(own, DrafterSettings) or len(samplings) > 1
        else own.without_sampling
        for key, own in each.items()
    }
    times = Counter(labels.values())
    alike: dict[str, list[str]] = {}
    for key, label in labels.items():
        if times[label] > 1:
            alike.setdefault(label, []).append(key)
    for label, keys in alike.items():
        length = SHORTEST
        while len({key[:length] for key in keys}) < len(keys):
            length += 1
        labels |= {key: f"{label} ({key[:length]})" for key in keys}
    return labels
