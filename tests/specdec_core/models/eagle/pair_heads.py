"""A head for a pair of the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import save_head
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


def save_head_of(pair: Pair, folder: Path, form: Any = "speculators", **changes: Any) -> None:
    """Write such a head."""
    card = EagleCard(target=pair.spec.target, target_fingerprint=pair.fingerprints["target"])
    save_head(head_of(pair, **changes), folder, card, form=form)


def taught_head_of(pair: Pair, texts: Sequence[Sequence[int]], first: int) -> EagleHead:
    """A head that knows what these texts of one length have from number `first` on: most that it
    drafts there is accepted, as long as it reads the target's features and its own states."""
    head = head_of(pair, pair.target.config.vocab_size)
    own = [weights for name, weights in head.named_parameters() if "embed_tokens" not in name]
    tokens = torch.tensor(texts, device=pair.target.device)
    with torch.no_grad():
        hidden = pair.target(tokens, output_hidden_states=True).hidden_states
    read = torch.cat([hidden[layer] for layer in head.settings.feature_layers], -1)[:, :-2]
    known, length = tokens[:, 1:-1], read.shape[1]
    mask = torch.full((length, length), -torch.inf, device=read.device).triu(1)[None, None]
    places = torch.arange(length, device=read.device)[None]
    optimiser = torch.optim.Adam(own, 1e-2)
    for _ in range(60):
        states, loss = head.fused(read), torch.zeros((), device=read.device)
        for step in range(3):  # from features, then from the head's own states
            states = head(known, states, places, mask)
            logits = head.logits(states[:, first - 2 + step :])
            loss += cross_entropy(logits.flatten(0, 1), tokens[:, first + step :].flatten())
            states = torch.cat([head.fused(read[:, :1]), states[:, :-1]], dim=1)
        for weights, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
            weights.grad = gradient
        optimiser.step()
    for weights in own:
        weights.requires_grad_(False)
    return head
