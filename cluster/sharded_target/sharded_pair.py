"""A pair with its models on the devices of a placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.draft_actor import PlacedDraft
from cluster.placement import Placed, place
from cluster.sharded_target.sharded_runner import ShardedRunner
from cluster.sharded_target.target_group import TargetGroup
from specdec_core.config import PairSpec, Placement
from specdec_core.models.eagle.runner import ReadRows
from specdec_core.models.loading import load_skeleton
from specdec_core.models.pair import (
    Draft,
    Pair,
    check_pair,
    eagle_heads_of,
    max_length_of,
    resolve_dtypes,
)
from specdec_core.models.runner import CacheLost, ModelRunner


@dataclass
class ShardedPair(Pair):
    """A pair with its models on `placed` devices. `target` and `drafts` have configurations only:
    the target's weights are with the `group`, the drafts' with the draft's process or, where none
    is placed, with the shard that answers for the target."""

    group: TargetGroup = field(kw_only=True)
    draft: PlacedDraft = field(kw_only=True)

    @property
    def placement(self) -> Placement:
        return self.draft.placed.placement

    @property
    def losses(self) -> int:
        return self.group.rebuilt + self.draft.losses

    def open_runner(
        self,
        draft: str | None,
        slots: int,
        target: ModelRunner | ReadRows | None = None,
        max_length: int | None = None,
        cache_tokens: int | None = None,
    ) -> ShardedRunner:
        size = self.target.config.get_text_config(decoder=True).vocab_size
        apart = draft is not None and self.placement.draft.devices
        group = self.draft.group if apart else self.group
        return ShardedRunner(group, slots, size, cache_tokens, draft, max_length)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], draft: str | None = None) -> Tensor:
        runner = self.open_runner(draft, 1)
        with suppress(CacheLost):  # then a process has been started again
            return torch.cat([*runner.predict(0, tokens)])
        return torch.cat([*runner.predict(0, tokens)])

    def reloaded(self, spec: PairSpec) -> ShardedPair:
        """This pair, with its models loaded as `spec` says: a device has room for one pair."""
        if spec != self.spec:
            self.close()
            vars(self).update(vars(load_sharded(spec, self.draft.placed)))
        return self

    def close(self) -> None:
        """End the processes; the devices stay reserved."""
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
    # The actors decide devices and data types, whatever this process has.
    device = "cuda" if placed.kind == "GPU" else "cpu"
    spec = resolve_dtypes(spec.with_runner(device=device))
    heads = eagle_heads_of(spec)
    drafts: dict[str, Draft] = {
        name: load_skeleton(model) for name, model in spec.drafts.items() if name not in heads
    }
    group = TargetGroup(placed, spec.with_runner(max_length=max_length_of(spec)))
    target, draft = load_skeleton(spec.target), PlacedDraft(placed, spec)
    open_link = draft.link if placed.placement.draft.devices else None
    return ShardedPair(
        spec, tokenizer, target, drafts, open_link=open_link, group=group, draft=draft
    )
