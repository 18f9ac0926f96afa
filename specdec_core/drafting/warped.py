"""The output of a target or a draft model, changed by the requests' warpers, and where it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_core.drafting.drafter import SlotState
from specdec_core.models.runner import Output
from specdec_core.tokens.acceptance import Places


def warped(
    output: Output, states: Sequence[SlotState], paths: Callable[[int], Sequence[Sequence[int]]]
) -> Output:
    """`output` with its first rows, one for each of `states`, warped by rules that depend on the
    request's sequence (:mod:`specdec_core.tokens.text_warper`). `paths(n)` are the tokens after the
    sequence of state n on the way to each of its places. The result is `output` where no request
    has such a warper."""
    if all(state.warper is None for state in states):
        return output
    parts, chosen = list(output.logits.split(list(output.counts))), output.chosen.clone()
    first = 0
    for n, (state, part) in enumerate(zip(states, parts, strict=False)):
        if state.warper is not None and len(part):
            parts[n] = state.warper.warp(part, state.tokens, paths(n))
            chosen[first : first + len(part)] = parts[n].argmax(dim=-1)
        first += len(part)
    return Output(output.counts, torch.cat([p.float() for p in parts]), output.hidden, chosen)


def places(states: Sequence[SlotState], positions: Sequence[int], output: Output) -> Places:
    """The n places that `output` has logits for: `positions` in the sequences of `states`."""
    return Places(
        [state.sampling for state in states],
        [state.random for state in states],
        positions,
        lambda: output.logits,
        lambda: output.chosen,
    )
