"""Greedy decoding writes what the target writes by itself, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.engine import Engine, Request
from specdec_core.evidence.certificate.certificate import GreedyIdentity
from specdec_core.evidence.certificate.decoding import Links, decoded, here_alone
from specdec_core.models.pair import Pair


def check_greedy(
    pair: Pair,
    configuration: Configuration,
    requests: Sequence[Request],
    slots: int,
    observer: Observer,
    links: Links = here_alone,
) -> GreedyIdentity:
    """Decode `requests` with `slots` of them at a time, and each alone and autoregressively.

    Sharing steps with other requests must change nothing either, as when serving.
    """
    observer.stage("greedy texts, autoregressive", len(requests))
    greedy = {"sampling": configuration.sampling.model_copy(update={"temperature": 0.0})}
    alone, ours = (c.model_copy(update=greedy) for c in (AUTOREGRESSIVE, configuration))
    expected = Engine(pair, alone).generate(requests, lambda _: observer.step())
    observer.stage("greedy texts, speculative", len(requests))
    found = decoded(pair, ours, requests, slots, observer, links)
    differing, first = 0, ""
    for request, one, other in zip(requests, found, expected, strict=True):
        if one.tokens != other.tokens:
            differing += 1
            first = first or _difference(pair, request, one.tokens, other.tokens)
    return GreedyIdentity(
        prompts=len(requests),
        tokens=sum(len(generation.tokens) for generation in expected),
        slots=slots,
        differing=differing,
        first=first,
    )


@torch.inference_mode()
def _difference(pair: Pair, request: Request, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Where two texts begin to differ, and by how much the target prefers its own token: next to
    nothing tells of a tie that rounding decides, and not of a fault."""
    pairs = zip(ours, theirs, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    if at == min(len(ours), len(theirs)):
        return f"prompt {request.id}, after token {at}: one of the texts ends there"
    text = torch.tensor([[*request.tokens, *theirs[:at]]], device=pair.target.device)
    logits = pair.target(input_ids=text).logits[0, -1].float()
    margin = float(logits[theirs[at]] - logits[ours[at]])
    return (
        f"prompt {request.id}, token {at}: {ours[at]} in place of {theirs[at]}, whose logit is"
        f" {margin:.2g} higher"
    )
