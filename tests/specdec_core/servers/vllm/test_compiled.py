"""What vLLM has compiled on a CPU is loaded by its next process."""

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.models.pair import load_pair
from specdec_core.servers.process import running
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm.compiled import CORES, METHOD, factors, load
from tests.peers import peers_of, vllm_installed


def test_functions_that_are_loaded_take_vllms_call_and_a_method_of_their_own_stays():
    def compiled():
        return "computed"

    def own_load(function):
        return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=function))

    found = load(own_load, compiled)._artifacts.compiled_fn
    assert found() == "computed"
    assert getattr(found, METHOD)({"any": "configuration"}) is None

    compiled.finalize_loading = own = object()
    assert load(own_load, compiled)._artifacts.compiled_fn.finalize_loading is own


def test_what_is_compiled_depends_on_the_number_of_threads_not_on_their_cores():
    found = factors(lambda: {CORES: "1", "OTHER": 2})
    assert found == {"OTHER": 2, "threads": torch.get_num_threads()}


@pytest.mark.long
@vllm_installed
@pytest.mark.parametrize("repaired", [True, False])
def test_vllm_compiles_a_model_once(tmp_path, monkeypatch, repaired):
    runner = RunnerSettings(target_dtype="float32", device="cpu", max_length=128)
    pair = load_pair(PairSpec(target="bundled:draft-small", drafts={}, runner=runner))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    if not repaired:
        monkeypatch.setenv("VLLM_PLUGINS", "none")
    texts = []

    def made():
        files = [path.stat() for path in tmp_path.glob("torch_compile_cache/**/model")]
        return [(file.st_ino, file.st_mtime_ns) for file in files]

    def decoded():
        with closing(peers_of(pair, "vllm")[0]) as peer:
            peer.open()
            texts.append(peer.decode(tuple(range(5, 14)), 12))
        return made()

    first = decoded()
    assert first
    # What vLLM does by itself. Were it mended, the repair could go.
    assert (decoded() == first) == repaired
    assert texts[0] == texts[1]
    if repaired:
        server = SERVERS["vllm"]
        served = server.served(pair, server.modes(pair, served=True)[0], (0,), tmp_path)
        with running(served.process("vllm", 1, tmp_path / "log")):
            assert made() == first  # its thread is bound to a core
