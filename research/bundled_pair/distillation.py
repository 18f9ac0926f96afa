"""The pair's drafts, distilled from the target."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.bundled_pair.corpus_rows import shuffled
from research.bundled_pair.optimisation import DECAY, Report, build, train
from research.bundled_pair.settings import Settings
from research.bundled_pair.teacher import LabelledRows
from specdec_core.training.optimiser import Optimiser


def distillation_loss(
    logits: torch.Tensor, teacher: LabelledRows, argmax_weight: float
) -> torch.Tensor:
    """Cross-entropy with (1 - w) p + w onehot(argmax p), averaged over rows and positions.

    That is (1 - w) KL(p || q) + w CE(argmax p, q) up to p's entropy: forward KL, with some of the
    weight moved to what greedy verification asks for. `logits` [rows, length, vocabulary].
    """
    shares = teacher.shares * (1 - argmax_weight)
    shares[..., 0] += argmax_weight
    expected = (shares * logits.gather(-1, teacher.choices)).sum(-1)
    return (logits.logsumexp(-1) - expected).mean()


def distil(
    settings: Settings,
    work: Path,
    name: str,
    end: int,
    own_text: LabelledRows,
    corpus_text: LabelledRows,
    report: Report,
) -> None:
    """One draft from the teacher's distributions over its own and corpus text, into
    `work`/<name>.pt."""
    if (work / f"{name}.pt").exists():
        return
    torch.manual_seed(settings.seed + 2)
    draft = build(settings.drafts[name], settings, end)

    def loss(**labelled: Tensor) -> Tensor:
        rows = LabelledRows(**labelled)
        logits = draft(rows.tokens, use_cache=False).logits.float()
        return distillation_loss(logits, rows, settings.argmax_weight)

    train(
        name,
        draft,
        Optimiser(draft, settings.distil_matrix_rate, settings.distil_other_rate, DECAY),
        loss,
        _LabelledBatches(own_text, corpus_text, settings),
        settings,
        settings.distil_minutes,
        work,
        report,
        own_text_tokens=own_text.tokens.numel(),
        corpus_text_tokens=corpus_text.tokens.numel(),
    )


@dataclass(frozen=True)
class _LabelledBatches:
    own_text: LabelledRows
    corpus_text: LabelledRows
    settings: Settings

    def __len__(self) -> int:
        settings = self.settings
        batch = settings.distil_rows * settings.text_row_tokens
        return math.ceil(settings.distil_tokens / batch)

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        settings, [number] = self.settings, numbers
        own = round(settings.distil_rows * settings.distil_own_text)

        def some(text: LabelledRows, count: int) -> LabelledRows:
            first = number * count
            return text.rows(shuffled(len(text.tokens), settings.seed, first, count))

        rows = some(self.own_text, own)
        rows = rows.followed_by(some(self.corpus_text, settings.distil_rows - own))
        return {**vars(rows), "count": rows.tokens.numel()}
