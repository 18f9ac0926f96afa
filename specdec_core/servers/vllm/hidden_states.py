"""The hidden states that vLLM writes beside its answers, written on a CPU, too.

The speculative method `extract_hidden_states` keeps them in the KV cache, and the connector
`ExampleHiddenStatesConnector` writes those of a finished request to a file. In 0.32 the connector
copies them by a GPU's stream to pinned memory, which a CPU does not have.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch
from safetensors.torch import save_file


def repair() -> None:
    """In a process of vLLM on a CPU: have the connector write without a stream."""
    with suppress(ImportError):  # another release of vLLM
        from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector

        connector = example_hidden_states_connector.ExampleHiddenStatesConnector
        connector._submit_async_write = _write


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True


def _write(connector: Any, pending: Any) -> None:
    """Write the states of a finished request, and release its file's lock."""
    if not connector._is_tp_rank_zero:
        return
    cache, size = connector._kv_cache, connector._block_size
    places = torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)
    places = places.flatten()[: len(pending.token_ids)]
    # Views of the cache are (blocks, layers, tokens of a block, width).
    states = cache[places // size, :, places % size].contiguous()
    save_file({"hidden_states": states, "token_ids": pending.token_ids}, pending.filename)
    if (held := connector._lock_fds.pop(pending.req_id, None)) is not None:
        os.close(held)
    connector._req_copy_events[pending.req_id] = _Done()
