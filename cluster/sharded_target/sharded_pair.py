"""A pair with its target on the devices of a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from cluster.placement import Placed, place
from cluster.sharded_target.sharded_runner import ShardedRunner
from cluster.sharded_target.target_group import TargetGroup
from specdec_core.config import PairSpec, Placement
from specdec_core.models.eagle.runner import ReadRows
from specdec_core.models.loading import load_config, load_skeleton
from specdec_core.models.pair import Draft, Pair, check_pair, load_drafts, resolve_dtypes
from specdec_core.models.runner import ModelRunner


@dataclass
class ShardedPair(Pair):
    """`target` has the target's configuration only; its weights are with the `group`."""

    group: TargetGroup = field(init=False)

    def open_runner(
        self,
        draft: str | None,
        slots: int,
        target: ModelRunner | ReadRows | None = None,
        max_length: int | None = None,
        cache_tokens: int | None = None,
    ) -> ModelRunner:
        if draft is not None:
            return super().open_runner(draft, slots, target, max_length, cache_tokens)
        size = self.target.config.get_text_config(decoder=True).vocab_size
        return ShardedRunner(self.group, slots, size, self.spec.runner.device, cache_tokens)


@contextmanager
def sharded_pair(spec: PairSpec, placement: Placement) -> Iterator[ShardedPair]:
    """The pair with its drafts in this process and its target on devices of the connected cluster,
    which are reserved for it and released at the end.

    Raises:
        UserError: the pair, the placement or both together are wrong.
    """
    placed = place(placement)
    try:
        pair = load_sharded(spec, placed)
        try:
            yield pair
        finally:
            pair.group.close()
    finally:
        placed.remove()


def load_sharded(spec: PairSpec, placed: Placed, drafts: bool = True) -> ShardedPair:
    """The pair with its target on the devices of `placed`. Its drafts are loaded in this process;
    without `drafts`, only their configurations are."""
    torch.set_num_threads(spec.runner.threads)
    tokenizer = check_pair(spec)
    if placed.kind == "GPU" and spec.runner.target_dtype == "auto":
        # The checkpoint's data type, wherever the drafts are.
        dtype = load_config(spec.target).dtype or torch.float32
        runner = spec.runner.model_copy(update={"target_dtype": str(dtype).removeprefix("torch.")})
        spec = spec.model_copy(update={"runner": runner})
    spec = resolve_dtypes(spec)
    load = load_drafts if drafts else _skeletons
    pair = ShardedPair(spec, tokenizer, load_skeleton(spec.target), load(spec))
    runner = spec.runner.model_copy(update={"max_length": pair.max_length})
    pair.group = TargetGroup(placed, spec.model_copy(update={"runner": runner}))
    return pair


def _skeletons(spec: PairSpec) -> dict[str, Draft]:
    return {name: load_skeleton(model) for name, model in spec.drafts.items()}
