"""One configuration, one value.

A :class:`Configuration` says how tokens are drafted and sampled. The same frozen value is a Tune
trial, an MLflow run, a registry entry, a Serve deployment and a line of a report. Unknown keys are
errors that name the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import model_validator

from specdec_core.config.base import Value
from specdec_core.config.drafters import Drafter, DrafterSettings
from specdec_core.config.sampling import Sampling


class Configuration(Value):
    """How one request is decoded. Without a drafter this is autoregressive decoding."""

    drafter: Drafter | None = None
    sampling: Sampling = Sampling()

    @model_validator(mode="before")
    @classmethod
    def _sample_as_the_arms(cls, value: Any) -> Any:
        """An arm of a bandit may be a whole configuration; all must sample alike."""
        if not isinstance(value, dict):
            return value
        asked = [*_sampling_of_arms(value.get("drafter"))]
        given = [value["sampling"]] if "sampling" in value else []
        distinct = {Sampling.model_validate(sampling) for sampling in [*given, *asked]}
        if asked and len(distinct) > 1:
            shown = " and ".join(sorted(str(s.model_dump(exclude_defaults=True)) for s in distinct))
            raise ValueError(
                f"drafter.arms: arms with different sampling settings ({shown}); a bandit chooses"
                " who drafts, all must sample alike"
            )
        return {**value, "sampling": asked[0]} if asked and not given else value

    @property
    def id(self) -> str:
        """Stable short id: the hash of the canonical JSON."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    @property
    def label(self) -> str:
        """What a person reads in a table."""
        name = self.drafter.label if self.drafter else "autoregressive"
        if self.sampling.greedy:
            return name
        warpers = [f"T={self.sampling.temperature:g}"]
        warpers += [f"top-k={self.sampling.top_k}"] if self.sampling.top_k else []
        warpers += [f"top-p={self.sampling.top_p:g}"] if self.sampling.top_p < 1 else []
        warpers += ["coupled"] if self.sampling.coupling == "gumbel" else []
        return f"{name} ({', '.join(warpers)})"

    @property
    def family(self) -> str:
        """Configurations that differ only in their numbers share a family."""
        return self.drafter.family if self.drafter else "autoregressive"

    @property
    def draft(self) -> str | None:
        """The draft model that is named first in it; None where none is."""
        parts = self.drafter.walk() if self.drafter else ()
        return next((own for p in parts if (own := getattr(p, "draft", None)) is not None), None)

    @property
    def beside(self) -> bool:
        """Whether it drafts on a device of its own while the target verifies, so that also its
        counts depend on time."""
        return self.drafter is not None and any(p.kind == "pearl" for p in self.drafter.walk())

    @property
    def drafts_itself(self) -> bool:
        """Whether the target's process has a draft model to run."""
        return self.drafter is not None and _runs_draft(self.drafter)

    @property
    def lossless(self) -> bool:
        """Whether the output provably has the target's distribution."""
        return self.drafter is None or self.drafter.lossless

    @property
    def lossy_methods(self) -> frozenset[str]:
        """The kinds of drafter in it, by themselves, that do not keep the target's distribution."""
        parts = self.drafter.walk() if self.drafter else ()
        return frozenset(part.kind for part in parts if not part.parts and not part.lossless)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _runs_draft(drafter: DrafterSettings) -> bool:
    if drafter.kind == "pearl":
        return False
    return hasattr(drafter, "draft") or any(map(_runs_draft, drafter.parts))


def _sampling_of_arms(drafter: Any) -> Iterator[Any]:
    """The sampling of every arm that is a whole configuration."""
    if not isinstance(drafter, dict):
        return
    for arm in drafter.get("arms") or ():
        if isinstance(arm, dict):
            if "sampling" in arm:
                yield arm["sampling"]
            yield from _sampling_of_arms(arm.get("drafter", arm))


AUTOREGRESSIVE = Configuration()
