"""A request's hidden states are written from its blocks of the cache."""

import fcntl
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from specdec_core.base.errors import UserError
from specdec_core.servers.hidden_states import taken
from specdec_core.servers.vllm.hidden_states import _write

BLOCK, TOKENS = 4, [7, 8, 9, 10, 11, 12]


@pytest.fixture
def written(tmp_path):
    """The file that the connector writes, and the cache that it writes from."""
    path = tmp_path / "0.safetensors"
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    connector = SimpleNamespace(
        _is_tp_rank_zero=True,
        _kv_cache=torch.randn(5, 2, BLOCK, 3),  # blocks, layers, places, width
        _block_size=BLOCK,
        _lock_fds={"0": lock},
        _req_copy_events={},
    )
    tokens = torch.tensor(TOKENS)
    pending = SimpleNamespace(req_id="0", filename=str(path), token_ids=tokens, block_ids=[3, 1])
    _write(connector, pending)
    assert connector._req_copy_events["0"].query()
    return path, connector._kv_cache


def test_the_states_of_its_tokens_are_read_in_order_once(written):
    path, cache = written
    states = taken(path, TOKENS)
    ordered = torch.cat([cache[3], cache[1]], dim=1)[:, : len(TOKENS)]  # layers, tokens, width
    assert torch.equal(states, ordered.transpose(0, 1).flatten(1))
    assert not [*path.parent.iterdir()]
    with pytest.raises(UserError, match=r"0.safetensors: hidden states cannot be read here"):
        taken(path, TOKENS)


def test_states_of_other_tokens_are_refused(written):
    with pytest.raises(UserError, match="hidden states of other tokens than the answer's"):
        taken(written[0], [7, 8, 1])
    assert written[0].exists()  # a file of something else is not removed


def test_a_file_without_hidden_states_is_refused_and_stays(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    path.with_name(f"{path.name}.lock").touch()
    with pytest.raises(UserError, match=r"weights.safetensors: hidden states cannot be read here"):
        taken(path, TOKENS)
    assert path.exists()
