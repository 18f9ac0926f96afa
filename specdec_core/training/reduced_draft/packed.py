"""A trained draft with a README made from its cards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_folder
from specdec_core.config.wording import count
from specdec_core.models.loading import load_config, load_skeleton
from specdec_core.models.reduced_draft import ReducedDraft, ReducedDraftConfig
from specdec_core.models.reduced_draft.storing import reduced_of
from specdec_core.training.recorded.finished import load_card, readme
from specdec_core.training.reduced_draft.training import DraftTrainingCard


def pack_draft(folder: Path, out: Path, name: str, about: str = "") -> DraftTrainingCard:
    """Copy the draft in `folder` into `out`, with a README; what was there is replaced.

    Args:
        folder: as training leaves it, its matrices in eight bits.
        out: where to.
        name: what commands will call the draft.
        about: Markdown at the end of the README, on what the cards do not know.

    Raises:
        UserError: there is no draft in `folder`, none of our training, or its target is missing.
    """
    card = load_card(folder, DraftTrainingCard)
    config = load_config(str(folder))
    if not isinstance(config, ReducedDraftConfig):
        raise UserError(f"{folder}: no draft with a reduced vocabulary")
    page = _page(folder, card, config, name, about)
    with atomic_folder(out) as new:
        shutil.copytree(folder, new, dirs_exist_ok=True)
        (new / "README.md").write_text(page, encoding="utf-8")
    return card


def _page(
    folder: Path, card: DraftTrainingCard, config: ReducedDraftConfig, name: str, about: str
) -> str:
    reduced, copied = reduced_of(config, str(folder)), card.settings.copied_layers
    begun = f", which began as the target's {', '.join(map(str, copied))}," if copied else ""
    tables = (
        "The embedding is a projection of the target's, the output layer its own."
        if reduced.projected
        else "The embedding and the output layer are the target's."
    )
    return readme(
        name,
        card,
        f"--target {reduced.target} --draft small={name}",
        f"A draft model for `{reduced.target}` (weights {card.fingerprint}):"
        f" {count(config.num_hidden_layers, 'decoder layer')}{begun} {config.hidden_size} wide. It"
        f" proposes {reduced.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens."
        f" {tables} Matrices are stored in eight bits.",
        [
            "| best tokens agree | Σ min(p, q) | tokens it can propose | forward |",
            "|--:|--:|--:|--:|",
            f"| {card.best.agreement:.3f} | {card.best.overlap:.3f} | {card.coverage:.1%}"
            f" | {_forward_share(config, reduced.target):.1%} |",
            "",
            f"On {card.texts['held_out']} held-out answers, a token ahead, before the weights were"
            " rounded to eight bits. Forward: parameters in layers and output layer, over the"
            " target's.",
        ],
        "cross-entropy with the target's distribution over the draft vocabulary, at each token of"
        " the answers.",
        about,
    )


def _forward_share(config: ReducedDraftConfig, target: str) -> float:
    """The parameters that a forward of the draft multiplies with, in layers and output layer, over
    the target's."""
    with torch.device("meta"):
        draft = ReducedDraft(config)
    return _multiplied(draft) / _multiplied(load_skeleton(target))


def _multiplied(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    inner = sum(weight.numel() for weight in model.base_model.parameters())
    outer = sum(weight.numel() for weight in output.parameters())
    return inner - int(embedding.weight.numel()) + int(outer)
