"""A head for a pair of the tests."""

from __future__ import annotations

from typing import Any

import torch

from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.pair import Pair


def head_of(pair: Pair, tokens: int = 96, seed: int = 0, **changes: Any) -> EagleHead:
    """A head for the target of `pair` that proposes every third of its first tokens, with random
    weights."""
    settings = EagleSettings.for_target(pair.target.config, tokens, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(settings).eval()
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
    step = settings.vocab_size // settings.draft_vocab_size
    head.propose_only(torch.arange(0, settings.draft_vocab_size * step, step))
    head.embed_tokens = pair.target.get_input_embeddings()
    return head.to(pair.target.device, pair.target.dtype)
