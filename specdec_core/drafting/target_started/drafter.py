"""Draft trees that the target begins (improved MCSD, §3.1).

The target draws the first tokens of every tree. Its own token of a round is then not added to the
output, but begins the tree of the next round. When that tree is fed, the target has read the whole
sequence, so the forward has no output for the sequence's last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.tree.drafter import TreeDrafter
from specdec_core.tokens.acceptance import Places, VerifierOutput, rule_of
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree
from specdec_core.tokens.topology import static_tree
from specdec_core.tokens.verification import Verdict, longest


class TargetStarted(TreeDrafter):
    """Grows trees that begin with `width` tokens of the target; one of the tokens is always
    accepted. In a request's first round, which has no candidates, the target only draws.

    The engine has this drafter judge its trees, in every round. With one token the output is
    lossless: the token is the target's own, and how deep the tree grows depends on draft tokens
    alone. Of several tokens the longest accepted path wins, which does not keep the target's
    distribution.
    """

    def __init__(self, settings: Any, resources: Resources) -> None:
        super().__init__(settings, resources)
        [self.width] = settings.children[0]
        self.shapes = [static_tree(settings.children)]
        self._starts: dict[int, list[int]] = {}  # by slot: the tokens that begin the next tree

    def open(self, sequences: Sequence[SlotState]) -> None:
        super().open(sequences)
        for sequence in sequences:
            self._starts[sequence.slot] = []

    def close(self, sequence: SlotState) -> None:
        self._starts.pop(sequence.slot, None)

    def begin(self, tree: TokenTree, sequence: SlotState) -> list[int]:
        tokens = self._starts[sequence.slot]
        tree.begun = len(tokens)
        return [tree.add(token, ROOT, TokenOrigin.TARGET) for token in tokens]

    def judge(
        self, state: SlotState, reading: VerifierOutput, logits: Callable[[], Tensor]
    ) -> tuple[Verdict, list[int]]:
        """The verdict on a tree and the target's :meth:`AcceptanceRule.choices`. The verdict has no
        token: that is drawn to begin the next tree. `logits` returns the forward's, warped: of the
        sequence, unless the target began the tree, and of each node."""
        rule, begun = rule_of(state.sampling), reading.tree.begun
        if begun:
            # The first entry is never used: the token there was drawn in the round before.
            probs = reading.probs
            probs = None if probs is None else torch.cat([probs[:1], probs])
            reading = reading._replace(likely=[ROOT, *reading.likely], probs=probs)
        choices = rule.choices(reading)
        if begun:
            verdicts = [rule.verify(reading, choices, node) for node in range(begun)]
            verdict = longest(range(begun), verdicts)
        else:
            verdict = rule.verify(reading, choices)
        self._starts[state.slot] = self._next(state, verdict, reading, logits)
        return replace(verdict, token=None), choices

    def _next(
        self,
        state: SlotState,
        verdict: Verdict,
        reading: VerifierOutput,
        logits: Callable[[], Tensor],
    ) -> list[int]:
        """At most `width` tokens, drawn without replacement after the accepted path, the verdict's
        token first."""
        assert verdict.token is not None  # the target has read all of a tree that it has begun
        if self.width == 1:
            return [verdict.token]
        end = verdict.path[-1] if verdict.path else ROOT
        place = end if reading.tree.begun else end + 1
        scores = logits()[place : place + 1]
        position = len(state.tokens) + len(verdict.path)
        likely = partial(scores.argmax, dim=-1)
        at = Places([state.sampling], [state.random], [position], lambda: scores, likely)
        at.probs = None if reading.probs is None else reading.probs[end + 1 : end + 2]
        return [verdict.token, *rule_of(state.sampling).others(verdict, at, self.width - 1)]


class TargetTreeDrafter(TargetStarted):
    """Each of the target's tokens has a subtree of the same shape."""


class TargetForkDrafter(TargetStarted):
    """Each of the target's tokens is followed by chains."""
