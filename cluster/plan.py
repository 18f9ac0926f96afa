"""What a sweep is asked to do: a YAML file, checked in full before anything starts."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from specdec_core.config import (
    Configuration,
    DraftModelDrafter,
    PairSpec,
    Sampling,
    Value,
    load_yaml,
    parse,
)
from specdec_core.errors import UserError
from specdec_core.search import Search

DRAFT_MODEL = DraftModelDrafter.model_fields["kind"].default


class PromptSource(Value):
    source: str = "bundled:held_out"
    limit: PositiveInt | None = None


class ProfileSettings(Value):
    """What to measure forwards at; unset, :func:`specdec_core.cost.profile_pair` decides."""

    widths: tuple[PositiveInt, ...] | None = None
    contexts: tuple[PositiveInt, ...] | None = None
    batches: tuple[PositiveInt, ...] | None = None
    repeats: PositiveInt | None = None


class Plan(Value):
    """A sweep.

    `search` lists configurations with open values (:mod:`specdec_core.search`). An entry with a
    draft model that names no draft is tried with each of the pair's.
    """

    pair: PairSpec = PairSpec()
    prompts: PromptSource = PromptSource()
    max_new_tokens: PositiveInt = 64
    sampling: Sampling = Sampling()
    search: tuple[dict[str, Any], ...]
    method: Literal["grid", "random", "optuna"] = "grid"
    trials: PositiveInt | None = Field(
        default=None, description="configurations to try; unset, the whole grid"
    )
    seed: NonNegativeInt = 0
    early_stopping: bool = Field(
        default=False, description="stop configurations that fall behind on the first prompts"
    )
    finalists: PositiveInt = Field(default=4, description="configurations timed alone")
    repeats: PositiveInt = Field(default=3, description="times a finalist runs each prompt")
    profile: ProfileSettings = ProfileSettings()

    def space(self, source: str = "sweep") -> Search:
        """What is searched; raises :class:`UserError`, naming `source`, for what is malformed."""
        entries = [completed for e in self.search if (completed := self._complete(e)) is not None]
        return Search.of(entries, source)

    def configurations(self, source: str = "sweep") -> list[Configuration] | None:
        """What to try, known in advance for a grid and for random search, or None for Optuna.
        Of a grid larger than `trials`, a random part."""
        if self.method == "optuna":
            return None
        if self.method == "random":
            return self.space(source).draw(self.trials or 1, self.seed)
        grid = self.space(source).grid()
        if self.trials is None or self.trials >= len(grid):
            return grid
        chosen = random.Random(self.seed).sample(range(len(grid)), self.trials)
        return [grid[i] for i in sorted(chosen)]

    def check(self, source: str = "sweep") -> None:
        """Validate every configuration, or for Optuna the ends of every range; raises
        :class:`UserError`, naming `source` and the key."""
        if self.method != "grid" and self.trials is None:
            raise UserError(f"{source}: trials: method {self.method} needs a number of trials")
        configurations = self.configurations(source)
        if configurations is None:
            configurations = self.space(source).extremes()
        for configuration in configurations:
            self._check(configuration, source)

    @property
    def autoregressive(self) -> Configuration:
        """What every speedup is against."""
        return Configuration(sampling=self.sampling)

    def digest(self, prompts_digest: str) -> str:
        """Names everything that the results depend on."""
        content = [self.model_dump(mode="json"), prompts_digest]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _complete(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        """`entry` with what the plan says for all of them; None when there is nothing to try it
        with, because the pair has no draft model."""
        drafter = entry.get("drafter")
        if isinstance(drafter, dict) and drafter.get("kind") == DRAFT_MODEL:
            if "draft" not in drafter and not self.pair.drafts:
                return None
            entry = {**entry, "drafter": {"draft": list(self.pair.drafts), **drafter}}
        return {"sampling": self.sampling.model_dump(), **entry}

    def _check(self, configuration: Configuration, source: str) -> None:
        if configuration.sampling != self.sampling:
            raise UserError(
                f"{source}: search: sampling {configuration.sampling.model_dump()} is not the "
                "sweep's own; a sweep compares configurations of one sampling, given at the top"
            )
        drafter = configuration.drafter
        if isinstance(drafter, DraftModelDrafter) and drafter.draft not in self.pair.drafts:
            known = ", ".join(self.pair.drafts) or "none"
            raise UserError(
                f"{source}: search: drafter.draft: the pair has no draft {drafter.draft!r} "
                f"(it has: {known})"
            )


def load_plan(path: str | Path, **overrides: Any) -> Plan:
    """Read a sweep file; `overrides` replace its top-level values, a mapping key by key.

    Raises :class:`UserError` for anything wrong in it, every configuration included."""
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with a search in it")
    for key, value in overrides.items():
        old = content.get(key)
        content[key] = {**old, **value} if isinstance(old, dict) else value
    plan = parse(Plan, content, str(path))
    plan.check(str(path))
    return plan
