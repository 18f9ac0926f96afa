"""How many tokens to draft at each batch size.

A chain follows the target's greedy text up to the draft's first disagreement, so the draft's
agreement determines what every K drafts and has accepted. A profile gives the cost of that at each
batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from specdec_core.cost import Profile
from specdec_core.drafting.policies.by_batch import ByBatchSettings
from specdec_core.tokens.statistics import Counts

LENGTHS = tuple(range(1, 17))


@torch.inference_mode()
def agreement(
    draft: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """For each prompt, whether the draft's most likely token is the target's at each position of
    its greedy output: booleans (N,), from one forward over the text."""
    agreements = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output]], device=draft.device)
        logits = draft(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        agreements.append((logits.max(dim=-1).indices == ids[0, len(prompt) :]).cpu().numpy())
    return agreements


def chain_counts(agreeing: Sequence[np.ndarray], length: int) -> Counts:
    """Counts of greedy decoding with `length` candidates a round but the first, which has none;
    each of `agreeing` (N,) is a text's :func:`agreement`. Drafts are taken to continue after an
    early end token."""
    rounds = n_draft = n_accepted = tokens = 0
    for agrees in agreeing:
        position, n = 0, len(agrees)
        while position < n:
            drafted = min(length, n - position - 1) if position else 0
            differs = np.flatnonzero(~agrees[position : position + drafted])
            accepted = int(differs[0]) if len(differs) else drafted
            rounds, n_draft, n_accepted = rounds + 1, n_draft + drafted, n_accepted + accepted
            position += accepted + 1
        tokens += n
    return Counts(
        requests=len(agreeing),
        n=tokens,
        n_draft=n_draft,
        n_target=rounds,
        n_discarded=n_draft - n_accepted,
        n_drafted=n_draft,
        n_accepted=n_accepted,
        n_target_tokens=rounds,
        n_draft_tokens=n_draft,
    )


def predict(
    profile: Profile,
    counts: Mapping[int, Counts],
    batches: Iterable[int],
    draft: str | None = None,
    context: float | None = None,
) -> pd.DataFrame:
    """Throughput by a profile from the `counts` of each K: one row a batch size and K, where K = 0
    is autoregressive decoding. Columns: `batch`, `tokens` (K), `tokens_per_second` of all requests
    together, and `speedup` over autoregressive decoding."""
    rows = []
    for batch in batches:
        alone = profile.autoregressive_seconds(1, context, batch)
        seconds = {0: alone} | {
            k: profile.estimate_seconds(of_k, draft, context, batch) / of_k.n
            for k, of_k in counts.items()
        }
        rows += [
            {
                "batch": batch,
                "tokens": k,
                "tokens_per_second": 1 / each,
                "speedup": alone / each,
            }
            for k, each in seconds.items()
        ]
    return pd.DataFrame(rows)


def best_lengths(predicted: pd.DataFrame) -> dict[int, int]:
    """The fastest K of each batch size in what :func:`predict` returns."""
    best = predicted.loc[predicted.groupby("batch")["tokens_per_second"].idxmax()]
    return dict(zip(best["batch"].tolist(), best["tokens"].tolist(), strict=True))


def batch_policy(best: Mapping[int, int]) -> ByBatchSettings | None:
    """The policy that drafts `best[n]` tokens with n requests; it lists the batch sizes at which K
    changes. None where no batch size should draft."""
    tokens: dict[int, int] = {}
    for batch, k in sorted(best.items()):
        if not tokens or k != next(reversed(tokens.values())):
            tokens[1 if not tokens else batch] = k
    return ByBatchSettings(tokens=tokens) if any(tokens.values()) else None
