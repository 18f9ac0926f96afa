"""Labels of configurations that are shown together."""

from __future__ import annotations

from collections.abc import Iterable

from specdec_core.config.base import identity
from specdec_core.config.configuration import Configuration
from specdec_core.config.drafters import DrafterSettings
from specdec_core.config.policies import head_name

SHORTEST = 4  # characters of an id that are shown


def distinct_labels(shown: Iterable[Configuration | DrafterSettings]) -> dict[str, str]:
    """A label for each id, no two alike: equal labels get the names of their heads where these
    differ, else the first characters of their ids, as many as make them different. The sampling is
    left out where all have the same."""
    by_id = {identity(value): value for value in shown}
    samplings = {value.sampling for value in by_id.values() if isinstance(value, Configuration)}
    labels = {
        key: value.label
        if isinstance(value, DrafterSettings) or len(samplings) > 1
        else value.without_sampling
        for key, value in by_id.items()
    }
    alike: dict[str, list[str]] = {}
    for key, label in labels.items():
        alike.setdefault(label, []).append(key)
    for label, keys in alike.items():
        if len(keys) == 1:
            continue
        heads = {key: _heads(by_id[key]) for key in keys}
        if len(set(heads.values())) == len(keys):
            labels |= {key: f"{label} ({names})" for key, names in heads.items()}
            continue
        length = SHORTEST
        while len({key[:length] for key in keys}) < len(keys):
            length += 1
        labels |= {key: f"{label} ({key[:length]})" for key in keys}
    return labels


def _heads(value: Configuration | DrafterSettings) -> str:
    """The names of its trained heads, without their folders."""
    parts = value.parts if isinstance(value, Configuration) else value.walk()
    policies = [policy for part in parts for _, policy in part.policies]
    return ", ".join(head_name(head) for policy in policies for head in policy.heads)
