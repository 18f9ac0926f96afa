"""A length policy of your own: stop where the draft model wavers between two tokens.

`docs/guides/add-a-policy.md` goes on from here, with replay and a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from specdec_core.config import Configuration, PairSpec, PolicySettings, add_policy
from specdec_core.drafting.policies.policy import Rule
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair


class MarginSettings(PolicySettings):
    """Stop after a token whose two largest draft probabilities are closer than `threshold`."""

    kind: Literal["margin"] = "margin"
    threshold: float = 0.3
    max_tokens: int = 20
    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"margin {self.threshold:g}"

    @property
    def sentence(self) -> str:
        return f"Drafts until its two largest probabilities are closer than {self.threshold:g}."


class MarginPolicy(Rule):
    def values(self, signals: Any) -> Sequence[float]:
        top = signals.top_probabilities(2)
        return (top[:, 0] - top[:, 1]).tolist()

    def stops(self, value: Any) -> Any:
        return value < self.settings.threshold


add_policy("margin", __name__)

pair = load_pair(PairSpec())
policy = {"kind": "margin", "threshold": 0.4}
configuration = Configuration.model_validate({"drafter": {"kind": "draft_model", "policy": policy}})
engine = Engine(pair, configuration)
[generation] = engine.generate([Request("one", engine.encode("def main("), max_new_tokens=48)])
rounds = generation.rounds
print(generation.text)
print(f"{len(generation.tokens)} tokens in {len(rounds)} rounds,", configuration.label)
