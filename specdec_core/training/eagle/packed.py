"""A trained EAGLE head in eight bits, half its size, with a README made from its cards."""

from __future__ import annotations

from pathlib import Path

from specdec_core.base.files import atomic_folder
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.loading import load_head, read_card, save_head
from specdec_core.models.loading import load_skeleton
from specdec_core.training.eagle.acceptance import Acceptance
from specdec_core.training.eagle.training import EagleTrainingCard
from specdec_core.training.recorded.finished import CARD, load_card, readme


def pack_head(folder: Path, out: Path, name: str, about: str = "") -> EagleTrainingCard:
    """Write the head in `folder` into `out`, its matrices in eight bits, with the card of its
    training and a README; what was there is replaced.

    Args:
        folder: as training leaves it.
        out: where to.
        name: what commands will call the head.
        about: Markdown at the end of the README, on what the cards do not know.

    Raises:
        UserError: there is no head in `folder`, none of our training, or its target is missing.
    """
    card, told = load_card(folder, EagleTrainingCard), read_card(str(folder))
    head = load_head(str(folder), load_skeleton(told.target).config)
    assert isinstance(head, EagleHead), "training makes EAGLE-3 heads"
    with atomic_folder(out) as new:
        save_head(head, new, told, form="int8")
        (new / CARD).write_text(card.model_dump_json(indent=1) + "\n")
        page = card_page(card, told.target, name, about)
        (new / "README.md").write_text(page, encoding="utf-8")
    return card


def card_page(card: EagleTrainingCard, target: str, name: str, about: str = "") -> str:
    """The README, in Markdown, of the head called `name` for that `target`."""
    shape, settings = card.head, card.settings
    layers = ", ".join(map(str, shape.feature_layers))
    return readme(
        name,
        card,
        f"--target {target} --draft eagle={name}",
        f"An EAGLE-3 head for `{target}` (weights {card.fingerprint}): one decoder layer,"
        f" {shape.hidden_size} wide, that drafts from the target's own features. It reads the"
        f" inputs of the target's layers {layers} and proposes {shape.draft_vocab_size:,} of its"
        f" {shape.vocab_size:,} tokens. Matrices are stored in eight bits.",
        [
            *_table(card.best.acceptance),
            "",
            f"On {card.texts['held_out']} held-out answers, before the weights were rounded to"
            " eight bits. By position: the share of candidates that are accepted where those"
            " before them are. From any token: what a chain of that length from a random token of"
            " an answer yields, the target's own token included. A round: the mean when these"
            " answers are decoded, where a chain begins at the end of the one before. Of the tokens"
            f" of these answers {card.coverage:.1%} are in the draft vocabulary.",
        ],
        f"EAGLE-3's training-time test over {settings.steps} steps, each of {settings.share:.0%}"
        " of the chains of the one before; cross-entropy with the target's distribution.",
        about,
    )


def _table(found: Acceptance) -> list[str]:
    """Acceptance by position, a row for each way of decoding that was evaluated."""
    rows = found.kinds
    steps = max(len(positions) for positions, _, _ in rows.values())
    names = [*(str(n) for n in range(1, steps + 1)), "from any token", "a round"]
    lines = [f"| decoding | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for kind, (positions, length, tokens) in rows.items():
        shares = " | ".join(f"{a:.3f}" for a in positions)
        counted = "–" if tokens is None else f"{tokens:.2f}"
        lines.append(f"| {kind} | {shares} | {1 + length:.2f} | {counted} |")
    return lines
