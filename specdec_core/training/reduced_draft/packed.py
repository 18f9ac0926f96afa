"""A trained draft in eight bits, with a README made from its cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_folder
from specdec_core.config.wording import count
from specdec_core.models.loading import load_config, load_skeleton
from specdec_core.models.reduced_draft import ReducedDraft, ReducedDraftConfig
from specdec_core.models.reduced_draft.storing import Reduced, copy_packed, reduced_of
from specdec_core.training.recorded.finished import CARD, load_card
from specdec_core.training.recorded.recipe import recipe
from specdec_core.training.reduced_draft.training import DraftTrainingCard

_LOSS = (
    "cross-entropy with the target's distribution over the draft vocabulary, at each token of the"
    " answers."
)


def pack_draft(folder: Path, out: Path, name: str, about: str = "") -> DraftTrainingCard:
    """Write the draft in `folder` into `out`, its matrices in eight bits, with the card of its
    training and a README; what was there is replaced.

    Args:
        folder: as training leaves it.
        out: where to.
        name: what commands will call the draft.
        about: Markdown at the end of the README, of what the cards do not know: the prompts'
            origin, licences.

    Raises:
        UserError: there is no draft in `folder`, none of our training, or its target is missing.
    """
    card = load_card(folder, DraftTrainingCard)
    config = load_config(str(folder))
    if not isinstance(config, ReducedDraftConfig):
        raise UserError(f"{folder}: no draft with a reduced vocabulary")
    with atomic_folder(out) as new:
        copy_packed(folder, new, config)
        (new / CARD).write_text(card.model_dump_json(indent=1) + "\n")
        page = card_page(card, config, reduced_of(config, str(folder)), name, about)
        (new / "README.md").write_text(page, encoding="utf-8")
    return card


def card_page(
    card: DraftTrainingCard,
    config: ReducedDraftConfig,
    reduced: Reduced,
    name: str,
    about: str = "",
) -> str:
    """The README, in Markdown; for the arguments see :func:`pack_draft`."""
    copied, layers = card.settings.copied_layers, count(config.num_hidden_layers, "decoder layer")
    begun = f", which began as the target's {', '.join(map(str, copied))}," if copied else ""
    whose = {"target": "the target's", "own": "its own"}
    lines = [
        f"# {name}",
        f"A draft model for `{reduced.target}` (weights {card.fingerprint}): {layers}{begun}"
        f" {config.hidden_size} wide. It proposes {reduced.draft_vocab_size:,} of the target's"
        f" {config.vocab_size:,} tokens. The embedding is {whose[reduced.embedding]}, the output"
        f" layer {whose[reduced.output]}. Matrices are stored in eight bits.",
        "",
        "```",
        f"specdec sweep --target {reduced.target} --draft small={name} --prompts prompts.jsonl",
        "```",
        "",
        "## Figures",
        "| best tokens agree | Σ min(p, q) | tokens it can propose | forward |",
        "|--:|--:|--:|--:|",
        f"| {card.best.agreement:.3f} | {card.best.overlap:.3f} | {card.coverage:.1%}"
        f" | {forward_share(config, reduced.target):.1%} |",
        "",
        f"On {card.texts['held_out']} answers held out, a token ahead, before the weights were"
        " rounded to eight bits. Forward: parameters in layers and output layer, over the"
        " target's.",
        "",
        *recipe(card, _LOSS),
        "",
        *([about.strip(), ""] if about else []),
    ]
    return "\n".join(lines)


def forward_share(config: ReducedDraftConfig, target: str) -> float:
    """The parameters that a forward of the draft multiplies with, those of layers and output
    layer, over those of its target."""
    with torch.device("meta"):
        draft = ReducedDraft(config)
    return _multiplied(draft) / _multiplied(load_skeleton(target))


def _multiplied(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    inner = sum(weight.numel() for weight in model.base_model.parameters())
    outer = sum(weight.numel() for weight in output.parameters())
    return inner - int(embedding.weight.numel()) + int(outer)
