"""A trained EAGLE head in eight bits, half its size."""

from __future__ import annotations

from pathlib import Path

from specdec_core.base.files import atomic_folder
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.loading import load_head, read_card, save_head
from specdec_core.models.loading import load_skeleton
from specdec_core.training.eagle.training import EagleTrainingCard
from specdec_core.training.recorded.finished import CARD, load_card


def pack_head(folder: Path, out: Path) -> None:
    """Write the head in `folder`, as training leaves it, into `out`, its matrices in eight bits,
    with the card of its training. What was in `out` is replaced.

    Raises:
        UserError: there is no head in `folder`, none of our training, or its target is missing.
    """
    card, told = load_card(folder, EagleTrainingCard), read_card(str(folder))
    head = load_head(str(folder), load_skeleton(told.target).config)
    assert isinstance(head, EagleHead), "training makes EAGLE-3 heads"
    with atomic_folder(out) as new:
        save_head(head, new, told, form="int8")
        (new / CARD).write_text(card.model_dump_json(indent=1) + "\n")
