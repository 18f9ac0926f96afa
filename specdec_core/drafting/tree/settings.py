"""The settings of trees of one shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from specdec_core.config import (
    AnyPolicy,
    ModelSettings,
    PolicyDrafterSettings,
    RecordingFacts,
    Width,
)
from specdec_core.drafting.policies.fixed import FixedSettings

Shape = Annotated[tuple[int | tuple[int, ...], ...], Field(min_length=1)]
Children = tuple[tuple[int, ...], ...]


def levels(branching: Iterable[int | tuple[int, ...]]) -> Children:
    """The number of children of each node of each level. Level 0 is the sequence's last token. A
    number holds for all nodes of its level."""
    children, width = [], 1
    for counts in branching:
        children.append(counts if isinstance(counts, tuple) else (counts,) * width)
        width = sum(children[-1])
    return tuple(children)


class TreeSettings(ModelSettings):
    """A static tree: level i gives each node `branching[i]` children, drawn from the draft model
    without or with replacement; its most likely tokens when greedy. Of numbers alone it is a
    k-configuration (MCSD); a list has the number of children of each node of the level before, in
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
    def children(self) -> Children:
        """The number of children of each node, by level; see :func:`levels`."""
        return levels(self.branching)

    @property
    def label(self) -> str:
        if any(isinstance(counts, tuple) for counts in self.branching):
            size = f"of {self.nodes}"
        else:
            size = "-".join(map(str, self.branching))
        return f"tree {size}, {self.draft_name}{', replaced' if self.replacement else ''}"

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


class ForkSettings(PolicyDrafterSettings):
    """Chains, `width` of them, that part at the first token. All of them grow until the policy
    would stop every one of them (improved MCSD, §3.2 and §3.3)."""

    kind: Literal["fork"] = "fork"
    policy: AnyPolicy = FixedSettings()
    width: Width = 4
    replacement: bool = False

    @property
    def label(self) -> str:
        drawn = ", replaced" if self.replacement else ""
        return f"fork {self.width}, {self.draft_name}, {self.policy.label}{drawn}"

    @property
    def children(self) -> Children:
        """The number of children of each node at full depth, by level; see :func:`levels`."""
        return levels((self.width, *(1,) * (self.depth - 1)))

    @property
    def branches(self) -> int:
        """Chains side by side."""
        return self.width

    @property
    def nodes(self) -> int:
        return self.width * self.depth

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        if not isinstance(self.policy, FixedSettings):
            return "a fork's policy looks at all branches, only the accepted one is recorded"
        return self.unknown_tree(recording, whole)
