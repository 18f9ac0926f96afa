"""Draft trees that the target begins (improved MCSD, §3.1).

A drafter with a `target_width` has the target draw the first tokens of every tree. The target's own
token of a round is then not added to the text, but begins the next round's tree. When that tree is
fed, the target has read all of the text, so the forward has no output for the text's last token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specdec_core.drafting.drafter import SlotState
from specdec_core.tokens.acceptance import AcceptanceRule, Places, VerifierOutput, rule_of
from specdec_core.tokens.token_tree import ROOT
from specdec_core.tokens.verification import Verdict, longest


def with_text(reading: VerifierOutput) -> VerifierOutput:
    """`reading` of a tree's nodes alone, with a first entry for the text, which is never used: the
    token there was drawn in the round before."""
    likely, probs = [ROOT, *reading.likely], reading.probs
    probs = None if probs is None else torch.cat([probs[:1], probs])
    return reading._replace(likely=likely, probs=probs)


def verify(
    rule: AcceptanceRule, reading: VerifierOutput, choices: list[int], count: int
) -> Verdict:
    """The verdict with the longest path of those below each of the target's `count` tokens."""
    nodes = range(count)
    return longest(nodes, [rule.verify(reading, choices, node) for node in nodes])


def next_start(
    state: SlotState,
    verdict: Verdict,
    probs: Tensor | None,
    logits: Callable[[], Tensor],
    width: int,
) -> list[int]:
    """At most `width` tokens, drawn without replacement after the accepted path, that begin the
    next tree: the verdict's token first. `probs` (1 + nodes, vocabulary) are the target's
    distributions. `logits` returns the forward's: of the text, unless the target began the tree,
    and of each node."""
    assert verdict.token is not None  # the target has read all of a tree that it has begun
    if width == 1:
        return [verdict.token]
    end = verdict.path[-1] if verdict.path else ROOT
    place = end if state.target_start else end + 1
    scores = logits()[place : place + 1]
    position = len(state.tokens) + len(verdict.path)
    likely = partial(scores.argmax, dim=-1)
    at = Places([state.sampling], [state.random], [position], scores, likely)
    at.probs = None if probs is None else probs[end + 1 : end + 2]
    return [verdict.token, *rule_of(state.sampling).others(verdict, at, width - 1)]
