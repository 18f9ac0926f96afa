"""The settings of a static tree."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from specdec_core.config import ModelSettings, RecordingFacts
from specdec_core.config.drafters import shape

Shape = Annotated[tuple[int | tuple[int, ...], ...], Field(min_length=1)]


class TreeSettings(ModelSettings):
    """A static tree: level i gives each node `branching[i]` children, drawn from the draft model
    without or with replacement; its most likely tokens when greedy. Of numbers alone it is a
    k-configuration (MCSD); a list says how many children each node of the level before has, in
    their order (Sequoia's trees)."""

    kind: Literal["tree"] = "tree"
    branching: Shape = (4, 2, 2, 1)
    replacement: bool = False

    @field_validator("branching")
    @classmethod
    def _fits(cls, branching: tuple[Any, ...]) -> tuple[Any, ...]:
        """Each list has an entry for every node before it; equal entries become one number."""
        width, levels = 1, []
        for level, given in enumerate(branching):
            listed = isinstance(given, tuple)
            counts = given if listed else (given,)
            if listed and len(given) != width:
                raise ValueError(
                    f"level {level}: {len(given)} numbers for the {width} nodes before"
                )
            if min(counts, default=0) < 0 or not any(counts):
                raise ValueError(f"level {level}: expected numbers of children, not all of them 0")
            width = sum(counts) if listed else width * counts[0]
            levels.append(counts[0] if len(set(counts)) == 1 else counts)
        return tuple(levels)

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """How many children each node of each level has, the sequence's last token being level
        0."""
        levels, width = [], 1
        for counts in self.branching:
            levels.append(counts if isinstance(counts, tuple) else (counts,) * width)
            width = sum(levels[-1])
        return tuple(levels)

    @property
    def label(self) -> str:
        if any(isinstance(counts, tuple) for counts in self.branching):
            levels = f"of {self.nodes}"
        else:
            levels = shape(self.branching)
        return f"tree {levels}, {self.draft_name}{', replaced' if self.replacement else ''}"

    @property
    def depth(self) -> int:
        return len(self.branching)

    @property
    def nodes(self) -> int:
        width, nodes = 1, 0
        for counts in self.branching:  # not `children`: numbers may be too large to list
            width = sum(counts) if isinstance(counts, tuple) else width * counts
            nodes += width
        return nodes

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return self.unknown_tree(recording, whole)
