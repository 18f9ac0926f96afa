"""The settings of a tree that grows where the draft model is confident."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdec_core.config import MOST_NODES, AnyPolicy, PolicyDrafterSettings, RecordingFacts, Width
from specdec_core.drafting.policies.fixed import FixedSettings


class DynamicTreeSettings(PolicyDrafterSettings):
    """Expand the `expand` most confident nodes of a level with `children` candidates each, then
    keep the `keep` most confident of all (EAGLE-2's expand and rerank, on a draft model)."""

    kind: Literal["dynamic_tree"] = "dynamic_tree"
    policy: AnyPolicy = FixedSettings(max_tokens=6)
    expand: Width = 4
    children: Width = 4
    keep: Width = Field(default=24, description="nodes that are sent to verification")
    least: float = Field(
        default=0.0, ge=0, le=1, description="confidence below which a node is left out"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        expanded = self.expand * (self.depth - 1)  # the draft model reads these
        if expanded > MOST_NODES:
            raise ValueError(
                f"{self.kind}: expands {expanded} nodes (expand {self.expand} on {self.depth - 1} "
                f"levels), at most {MOST_NODES} are possible"
            )

    @property
    def label(self) -> str:
        return f"dynamic tree {self.keep}, {self.draft_name}, {self.policy.label}"

    @property
    def nodes(self) -> int:
        return self.keep

    @property
    def chain(self) -> bool:
        return False

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return "the draft's tokens after those that the target rejects are not recorded"
