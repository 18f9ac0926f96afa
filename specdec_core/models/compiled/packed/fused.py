"""A step whose many small kernels torch's compiler has joined into few, for a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specdec_core.models.compiled.packed.example import example
from specdec_core.models.compiled.packed.step import PackedStep

log = logging.getLogger(__name__)

Step = Callable[..., Sequence[Tensor]]

# For all runners of a model in this process.
_FUSED: WeakKeyDictionary[nn.Module, dict[Hashable, Step]] = WeakKeyDictionary()


@torch.inference_mode(False)  # torch.export takes no other tensors
def fused(
    step: PackedStep,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    features: Sequence[Tensor],
    blocks: Tensor,
    kinds: int,
) -> Step:
    """`step` for any numbers of tokens, in caches like these. Compiled when it is first called,
    which takes up to a minute, less where torch has kept what it compiled before.

    Raises any of torch's errors where the step cannot be traced.
    """
    known = _FUSED.setdefault(step.model, {})
    facts = kinds, step.last_position, step.vocab_size, keys[0].dtype, len(features), step.draft
    if facts not in known:
        log.warning("compiling kernels of %s", step.model.config.name_or_path)
        inputs, shapes = example(keys, values, features, kinds, blocks)
        with torch.no_grad():
            program = torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False)
        compiled: Any = torch.compile(program.module(), dynamic=True, fullgraph=True)
        known[facts] = compiled
    return known[facts]
