"""The features of the target that vLLM runs, for the EAGLE heads of our plug-in.

In 0.32 vLLM keeps the inputs of some of the target's layers for its own EAGLE-3 heads. Here it is
told to do so for the plug-in's. The features of a token are kept by the place that its keys and
values have in vLLM's cache. So there are also features of the beginning of a prompt that vLLM finds
in its prefix cache and does not compute again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_core.base.errors import UserError

NAME = "specdec"  # of what is added to vLLM's configuration


class CachedFeatures:
    """The features of up to `slots` sequences, which are the rows of a head's runner:
    :class:`specdec_core.models.eagle.runner.ReadRows`."""

    def __init__(self, layers: Sequence[int], vocab_size: int, slots: int) -> None:
        self.feature_layers, self.vocab_size = tuple(layers), vocab_size
        self.lengths = [0] * slots
        self._batch: dict[int, int] = {}  # the row of vLLM's batch of each slot

    def watch(self, vllm_config: Any) -> None:
        """Have the model runner whose proposer is now being made keep features. What it compiles
        gets another key, because the graph has more outputs. Raises :class:`UserError` where there
        are no features of some tokens or layers."""
        parallel = vllm_config.parallel_config
        split = ("pipeline_parallel", "decode_context_parallel", "prefill_context_parallel")
        if any(getattr(parallel, f"{name}_size", 1) > 1 for name in split):
            raise UserError("an EAGLE head in the plug-in needs all layers and tokens in a process")
        if vllm_config.kv_transfer_config is not None:
            raise UserError("an EAGLE head has no features of tokens that a KV connector loads")
        if max(self.feature_layers) >= vllm_config.model_config.hf_text_config.num_hidden_layers:
            raise UserError(
                "an EAGLE head reads what the target's output layer reads, which vLLM does not give"
            )
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        own = GPUModelRunner._setup_eagle3_aux_hidden_state_outputs

        def set_up(runner: Any) -> None:  # called once the target is loaded
            features = getattr(getattr(runner, "drafter", None), "features", None)
            if isinstance(features, CachedFeatures):
                features.attach(runner)
            else:
                own(runner)

        GPUModelRunner._setup_eagle3_aux_hidden_state_outputs = set_up
        key = {NAME: list(self.feature_layers)}
        vllm_config.additional_config = {**vllm_config.additional_config, **key}

    def attach(self, runner: Any) -> None:
        """Keep the features of each step of a model runner. Raises :class:`UserError` for a target
        that vLLM has no features of."""
        target = runner.get_model()
        if not hasattr(target, "set_aux_hidden_state_layers"):
            raise UserError(
                f"{type(target).__name__}: vLLM gives no features of it, which an EAGLE head reads"
            )
        target.set_aux_hidden_state_layers(self.feature_layers)
        runner.use_aux_hidden_state_outputs = True
        self._runner = runner
        begin, sample = runner.initialize_kv_cache, runner.sample_tokens

        def initialize_kv_cache(cache: Any, *given: Any, **named: Any) -> Any:
            done = begin(cache, *given, **named)
            self._allocate(cache)
            return done

        def sample_tokens(*given: Any, **named: Any) -> Any:
            if runner.execute_model_state is not None:  # there was a forward
                self._keep(runner.execute_model_state)
            return sample(*given, **named)

        runner.initialize_kv_cache, runner.sample_tokens = initialize_kv_cache, sample_tokens

    def _allocate(self, cache: Any) -> None:
        """Room for the features of all tokens in the cache (places, layers · width). Raises
        :class:`UserError` for a cache that forgets."""
        kept = [n for n, group in enumerate(cache.kv_cache_groups) if _keeps_all(group)]
        if not kept:
            raise UserError("an EAGLE head in the plug-in needs a layer that attends to all tokens")
        self._group = kept[0]
        config = self._runner.model_config
        places = cache.num_blocks * cache.kv_cache_groups[self._group].kv_cache_spec.block_size
        width = len(self.feature_layers) * config.get_hidden_size()
        device = self._runner.device
        self._store = torch.zeros((places, width), dtype=config.dtype, device=device)

    @property
    def _table(self) -> Any:
        return self._runner.input_batch.block_table[self._group]

    @torch.inference_mode()
    def _keep(self, step: Any) -> None:
        """Keep the features of a step's tokens."""
        count = step.scheduler_output.total_num_scheduled_tokens
        places = self._table.slot_mapping.gpu[:count]
        features = [layer[:count] for layer in step.aux_hidden_states]
        self._store[places] = torch.cat(features, dim=-1).to(self._store.dtype)

    def follow(self, rows: Mapping[int, int], lengths: Mapping[int, int]) -> None:
        """The sequence of each slot is in the row `rows[slot]` of the batch now, with features of
        `lengths[slot]` tokens."""
        self._batch = dict(rows)
        for slot, length in lengths.items():
            self.lengths[slot] = length

    def features(self, rows: Sequence[int], places: Sequence[int]) -> Tensor:
        """Of the tokens at `places[i]` of the sequence in slot `rows[i]`, (n, layers · width)."""
        table, tokens = self._table, np.array(places)
        batch = np.array([self._batch[row] for row in rows])
        blocks = table.get_numpy_array()[batch, tokens // table.block_size].astype(np.int64)
        return self._store[torch.from_numpy(blocks * table.block_size + tokens % table.block_size)]


def _keeps_all(group: Any) -> bool:
    """Whether a group of layers keeps the keys of all tokens."""
    from vllm.v1 import kv_cache_interface as kinds

    spec = group.kv_cache_spec
    spec = getattr(spec, "first_spec", spec)
    forgets = getattr(kinds, "RSWASpec", ())
    return isinstance(spec, kinds.FullAttentionSpec) and not isinstance(spec, forgets)
