"""What tests of every kind share: what a kind needs beside its name."""

from typing import Any

from specdec_core.config import Configuration, DrafterSettings, PolicySettings, Sampling, parse
from specdec_core.config.kinds import DRAFTERS, POLICIES, KindSettings, kinds_of

NEEDED: dict[str, dict[str, Any]] = {
    "break_even": {"target_cost": 5},
    "pre_cut": {"target_cost": 5},  # nothing measures it here
    "specdecpp": {"head": "specdecpp"},
    "decision": {"head": "t1"},
    "bandit": {"arms": [2, {"kind": "prompt_lookup"}]},
    "schedule": {"ranges": {1: 3, 2: {"kind": "prompt_lookup"}, 4: None}},
}


def drafter(kind: str, **changes: Any) -> DrafterSettings:
    """A drafter of this kind."""
    return kinds_of(DRAFTERS, KindSettings)[kind].model_validate(NEEDED.get(kind, {}) | changes)


def policy(kind: str, **changes: Any) -> PolicySettings:
    """A length policy of this kind."""
    return kinds_of(POLICIES, KindSettings)[kind].model_validate(NEEDED.get(kind, {}) | changes)


def configured(drafter: Any = None, sampling: Sampling | None = None) -> Configuration:
    """The configuration of a drafter's settings, which may be written as in a file."""
    if not isinstance(drafter, dict):
        return Configuration(drafter=drafter, sampling=sampling or Sampling())
    value = {"drafter": drafter, "sampling": (sampling or Sampling()).model_dump()}
    return parse(Configuration, value, "test")


def chain(kind: str = "fixed", **policy: Any) -> dict[str, Any]:
    """A draft model's chain with this length policy, as in a file."""
    return {"kind": "draft_model", "policy": {**NEEDED.get(kind, {}), "kind": kind, **policy}}
