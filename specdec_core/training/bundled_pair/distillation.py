"""The pair's drafts, distilled from the target."""

from pathlib import Path

import torch

from specdec_core.training.bundled_pair.corpus_rows import shuffled
from specdec_core.training.bundled_pair.optimisation import (
    Batch,
    Optimiser,
    Report,
    Training,
    build,
)
from specdec_core.training.bundled_pair.settings import Settings
from specdec_core.training.bundled_pair.teacher import LabelledRows


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
    own_rows = round(settings.distil_rows * settings.distil_own_text)

    def some(text: LabelledRows, number: int, count: int) -> LabelledRows:
        return text.rows(shuffled(len(text.tokens), settings.seed, number * count, count))

    def forward(number: int) -> Batch:
        own = some(own_text, number, own_rows)
        batch = own.followed_by(some(corpus_text, number, settings.distil_rows - own_rows))
        with torch.autocast("cpu", torch.bfloat16):
            logits = draft(batch.tokens, use_cache=False).logits
        logits = logits.float()
        agreed = logits[:own_rows].detach().argmax(-1) == own.choices[..., 0]
        figures = {"own_text_agreement": agreed.float().mean().item()}
        loss = distillation_loss(logits, batch, settings.argmax_weight)
        return loss, figures, batch.tokens.numel()

    training = Training(
        name,
        draft,
        Optimiser(draft, settings.distil_matrix_rate, settings.distil_other_rate),
        work,
        tokens=settings.distil_tokens,
        minutes=settings.distil_minutes,
        checkpoint_seconds=settings.checkpoint_seconds,
    )
    training.run(forward, report)
    training.finish(
        own_text_tokens=own_text.tokens.numel(),
        corpus_text_tokens=corpus_text.tokens.numel(),
        own_text_agreement=training.means["own_text_agreement"],
    )
