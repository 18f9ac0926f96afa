"""Judging the candidates of a step by what the target's forward says about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.warped import warped
from specdec_core.engine import target_start
from specdec_core.models.runner import NO_TOKEN, Output
from specdec_core.tokens.acceptance import VerifierOutput, rule_of
from specdec_core.tokens.sampling import distributions
from specdec_core.tokens.token_tree import TokenTree
from specdec_core.tokens.verification import Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a slot's tree. `choices` are the target's own tokens: [0] after the text,
    [i + 1] after node i; `target_start` those that begin the next tree. `logits` returns the
    target's own (places, vocabulary): after the text, unless the target began the tree, and after
    each node."""

    verdict: Verdict
    choices: list[int]
    target_start: list[int]
    logits: Callable[[], Tensor]


def judge(
    states: Sequence[SlotState],
    trees: Sequence[TokenTree],
    output: Output,
    likely: list[list[int]],
    target_width: int,
) -> list[Judgement | None]:
    """Accept or reject the candidates of each slot, by the rule for its request's sampling; None
    for a slot where some logits are no numbers.

    The first rows of `output` are the slots', `likely` its choices. The target draws `target_width`
    tokens to begin the next tree.
    """

    def paths(n: int) -> list[list[int]]:
        places = range(trees[n].read - output.counts[n], trees[n].read)  # the text is ROOT
        return [trees[n].path(place) for place in places]

    final, read = warped(output, states, paths), likely
    likely = likely if final is output else final.choices()
    probs: Sequence[Tensor | None] = [None] * len(states)
    if any(rule_of(state.sampling).samples for state in states):
        counts = final.counts[: len(states)]
        counted = zip(states, counts, strict=True)
        samplings = [state.sampling for state, count in counted for _ in range(count)]
        drawn = distributions(final.logits, samplings)
        assert drawn is not None
        probs = drawn.split(counts)
    return [
        None
        if NO_TOKEN in read[n] or NO_TOKEN in likely[n]
        else _judge(
            state,
            VerifierOutput(tree, likely[n], probs[n], state.random, len(state.tokens)),
            partial(final.of_row, n),
            partial(output.of_row, n),
            target_width,
        )
        for n, (state, tree) in enumerate(zip(states, trees, strict=True))
    ]


def _judge(
    state: SlotState,
    reading: VerifierOutput,
    final: Callable[[], Tensor],
    logits: Callable[[], Tensor],
    target_width: int,
) -> Judgement:
    """The judgement of one slot; `final` returns its logits as they are drawn from."""
    rule = rule_of(state.sampling)
    if state.target_start:
        reading = target_start.with_text(reading)
    choices = rule.choices(reading)
    if state.target_start:
        verdict = target_start.verify(rule, reading, choices, len(state.target_start))
    else:
        verdict = rule.verify(reading, choices)
    start = []
    if target_width:
        start = target_start.next_start(state, verdict, reading.probs, final, target_width)
    return Judgement(verdict, choices, start, logits)
