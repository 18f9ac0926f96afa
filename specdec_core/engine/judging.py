"""Judging the candidates of a step by what the target's forward says about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.warped import warped
from specdec_core.models.runner import NO_TOKEN, Output
from specdec_core.tokens.acceptance import VerifierOutput, rule_of
from specdec_core.tokens.sampling import distributions
from specdec_core.tokens.token_tree import TokenTree
from specdec_core.tokens.verification import Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a slot's tree. `choices` are the target's own tokens: [0] after the text,
    [i + 1] after node i. `logits` returns the target's own (places, vocabulary): after the text,
    unless the target began the tree, and after each node."""

    verdict: Verdict
    choices: list[int]
    logits: Callable[[], Tensor]


# The verdict on a tree and the target's choices, given a slot's state, what the target reads of the
# tree and a function that returns the logits which tokens are drawn from.
Judge = Callable[[SlotState, VerifierOutput, Callable[[], Tensor]], tuple[Verdict, list[int]]]


def judge_by_rule(
    state: SlotState, reading: VerifierOutput, _: Callable[[], Tensor]
) -> tuple[Verdict, list[int]]:
    """The judgement of the rule for the request's sampling."""
    rule = rule_of(state.sampling)
    choices = rule.choices(reading)
    return rule.verify(reading, choices), choices


def judge(
    states: Sequence[SlotState],
    trees: Sequence[TokenTree],
    output: Output,
    likely: list[list[int]],
    judged: Judge = judge_by_rule,
) -> list[Judgement | None]:
    """Accept or reject the candidates of each slot; None for a slot where some logits are no
    numbers. The first rows of `output` are the slots', `likely` its choices."""

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
        else Judgement(
            *judged(
                state,
                VerifierOutput(tree, likely[n], probs[n], state.random, len(state.tokens)),
                partial(final.of_row, n),
            ),
            partial(output.of_row, n),
        )
        for n, (state, tree) in enumerate(zip(states, trees, strict=True))
    ]
