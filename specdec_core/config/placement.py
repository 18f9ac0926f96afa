"""Which devices the draft and the target get."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from specdec_core.config.base import Value, load_yaml, parse


class DraftPlacement(Value):
    """The draft's devices: one, or 0 to run it on one of the target's."""

    devices: int = Field(default=1, ge=0, le=1)


class TargetPlacement(Value):
    """The target's devices, and how they split it: each has some of the attention heads of every
    layer, or whole layers."""

    devices: PositiveInt = 1
    split: Literal["heads", "layers"] = "heads"


class Placement(Value):
    """The devices of draft and target, on a laptop or a cluster. A device is a GPU where the
    cluster has any (`device: auto`), else a CPU core.

    `pack` puts the target into one node if any has enough devices, else into as few as possible;
    `strict_pack` requires one.
    """

    draft: DraftPlacement = DraftPlacement()
    target: TargetPlacement = TargetPlacement()
    strategy: Literal["pack", "strict_pack"] = "pack"
    device: Literal["auto", "gpu", "cpu"] = "auto"

    @classmethod
    def load(cls, path: Path | str) -> Placement:
        """Read a placement file. Raises :class:`UserError` for anything wrong in it."""
        return parse(cls, load_yaml(Path(path)), str(path))
