"""The confidence threshold that follows what was accepted and rejected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from specdec_core.config import MOST_TOKENS, MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome

if TYPE_CHECKING:
    from specdec_core.drafting.policies.signals import Signals

# With fewer verdicts than this the threshold stays where it began.
_LEAST_VERDICTS = 6
# A rejected candidate costs draft forwards, a draft that stopped too early costs a target forward.
_COST_OF_MISSING = 3


def best_threshold(probabilities: Sequence[float], accepted: Sequence[bool]) -> float:
    """The threshold on `probabilities` (n,) with the least false-positive rate + 3 · false-negative
    rate as a predictor of `accepted` (n,), which must hold both outcomes.

    Equal to the last bit to `thresholds[argmin(fpr + 3 (1 - tpr))]` of scikit-learn's `roc_curve`,
    which also leaves out points between collinear neighbours: rounding would otherwise choose
    differently among points of equal cost. Of equals the highest threshold is taken.
    """
    scores = np.asarray(probabilities, dtype=np.float64)
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    # A threshold admits all candidates of its value: one point for each distinct value.
    last = np.append(np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1)
    hits = np.cumsum(np.asarray(accepted, dtype=np.float64)[order])[last]
    misses = last + 1 - hits
    if len(last) > 2:
        bends = (np.diff(misses, 2) != 0) | (np.diff(hits, 2) != 0)
        corners = np.concatenate(([True], bends, [True]))
        last, hits, misses = last[corners], hits[corners], misses[corners]
    costs = misses / misses[-1] + _COST_OF_MISSING * (1 - hits / hits[-1])
    return float(scores[last[np.argmin(costs)]])


@dataclass(slots=True)
class _History:
    """One request's verdicts: the draft's probabilities of tokens that the target judged."""

    threshold: float
    probabilities: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    round: list[float] = field(default_factory=list)  # probabilities of the round in progress


class DynamicConfidenceSettings(PolicySettings):
    """Stop after a token with q(y) below a threshold that follows what was accepted and rejected
    (transformers' `assistant_confidence_threshold`)."""

    kind: Literal["dynamic_confidence"] = "dynamic_confidence"
    start: float = Field(default=0.4, gt=0, le=1)
    max_tokens: MaxTokens = MOST_TOKENS

    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"dynamic confidence {self.start:g}{self.up_to}"


class DynamicConfidencePolicy(LengthPolicy):
    """Stop after a token with q(y) < τ, where τ is moved after every round to the point of the
    request's ROC curve with the least cost (see :func:`best_threshold`).

    This is transformers' `assistant_confidence_threshold` with `num_assistant_tokens` =
    `max_tokens` and the schedule "constant". Its history and threshold live in the candidate
    generator, which is made anew for every `generate` call: so every request begins with `start`.
    """

    settings: DynamicConfidenceSettings
    learns = True
    reads = ("probability",)

    def __init__(self, settings: DynamicConfidenceSettings) -> None:
        super().__init__(settings)
        self._histories = defaultdict[int, _History](lambda: _History(settings.start))

    def threshold(self, slot: int) -> float:
        """The threshold now in force in `slot`."""
        return self._histories[slot].threshold

    def go_on(self, signals: Signals) -> Sequence[bool]:
        answers = []
        for slot, position, probability in zip(
            signals.slots, signals.positions, signals.probability, strict=True
        ):
            history = self._histories[slot]
            if position == 1:
                history.round = []
            history.round.append(probability)
            answers.append(probability >= history.threshold)
        return answers

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        history, accepted = self._histories[slot], outcome.accepted
        # The target has judged nothing after the first rejected token.
        judged, history.round = history.round[: accepted + 1], []
        history.probabilities += judged
        history.accepted += [True] * min(accepted, len(judged)) + [False] * (len(judged) - accepted)
        if len(history.accepted) >= _LEAST_VERDICTS and len(set(history.accepted)) == 2:
            history.threshold = best_threshold(history.probabilities, history.accepted)

    def reset(self, slot: int) -> None:
        self._histories.pop(slot, None)
