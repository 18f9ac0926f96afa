"""A pair with its models on the devices of a placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from cluster.draft_actor import PlacedDraft
from cluster.placement import Placed, place
from cluster.sharded_target.sharded_runner import ShardedRunner
from cluster.sharded_target.target_group import TargetGroup
from specdec_core.config import PairSpec, Placement
from specdec_core.models.eagle.runner import ReadRows
from specdec_core.models.loading import load_skeleton
from specdec_core.models.pair import Pair, check_pair, eagle_heads_of, resolve_dtypes
from specdec_core.models.runner import ModelRunner


@dataclass
class ShardedPair(Pair):
    """A pair with its models on `placed` devices. `target` and `drafts` have configurations only:
    the target's weights are with the `group`, the drafts' with the draft's process or, where none
    is placed, with the shard that answers for the target."""

    placed: Placed = field(kw_only=True)
    group: TargetGroup = field(init=False)

    @cached_property
    def draft(self) -> PlacedDraft:
        """The draft's process, which is started when it is first needed."""
        return PlacedDraft(self.placed, self.spec)

    def open_runner(
        self,
        draft: str | None,
        slots: int,
        target: ModelRunner | ReadRows | None = None,
        max_length: int | None = None,
        cache_tokens: int | None = None,
    ) -> ModelRunner:
        size = self.target.config.get_text_config(decoder=True).vocab_size
        apart = draft is not None and self.placed.placement.draft.devices
        group = self.draft.group if apart else self.group
        device = self.spec.runner.device
        return ShardedRunner(group, slots, size, device, cache_tokens, draft, max_length)

    def close(self) -> None:
        """End the processes; the devices stay reserved."""
        if "draft" in vars(self):
            self.draft.close()
        self.group.close()


@contextmanager
def sharded_pair(spec: PairSpec, placement: Placement) -> Iterator[ShardedPair]:
    """The pair with its models on devices of the connected cluster, which are reserved for it and
    released at the end.

    Raises:
        UserError: the pair, the placement or both together are wrong.
    """
    placed = place(placement)
    try:
        with closing(load_sharded(spec, placed)) as pair:
            yield pair
    finally:
        placed.remove()


def load_sharded(spec: PairSpec, placed: Placed) -> ShardedPair:
    """The pair with its models on the devices of `placed`."""
    torch.set_num_threads(spec.runner.threads)
    tokenizer = check_pair(spec)
    # The data types are those of the placed devices. This process has no device of its own.
    spec = resolve_dtypes(_on(spec, "cuda" if placed.kind == "GPU" else "cpu"))
    spec = _on(spec, "cpu")
    heads = eagle_heads_of(spec)
    drafts = {n: load_skeleton(model) for n, model in spec.drafts.items() if n not in heads}
    pair = ShardedPair(spec, tokenizer, load_skeleton(spec.target), drafts, placed=placed)
    runner = spec.runner.model_copy(update={"max_length": pair.max_length})
    pair.group = TargetGroup(placed, spec.model_copy(update={"runner": runner}))
    return pair


def _on(spec: PairSpec, device: str) -> PairSpec:
    return spec.model_copy(update={"runner": spec.runner.model_copy(update={"device": device})})
