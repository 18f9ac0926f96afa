"""What vLLM has compiled on a CPU is loaded by its next process."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.models.pair import load_pair
from specdec_core.servers.vllm.compiled import METHOD, Loading
from tests.peers import peers_of, vllm_installed


def test_functions_that_are_loaded_take_vllms_call_and_a_method_of_their_own_stays():
    def compiled():
        return "computed"

    def load(function):
        return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=function))

    found = Loading(load)(compiled)._artifacts.compiled_fn
    assert found() == "computed"
    assert getattr(found, METHOD)({"any": "configuration"}) is None

    compiled.finalize_loading = own = object()
    assert Loading(load)(compiled)._artifacts.compiled_fn.finalize_loading is own


@pytest.mark.long
@vllm_installed
@pytest.mark.parametrize("repaired", [True, False])
def test_vllm_compiles_a_model_once(tmp_path, monkeypatch, repaired):
    runner = RunnerSettings(target_dtype="float32", device="cpu", max_length=128)
    pair = load_pair(PairSpec(target="bundled:draft-small", drafts={}, runner=runner))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    if not repaired:
        monkeypatch.setenv("VLLM_PLUGINS", "none")
    texts, made = [], []
    for _ in range(2):
        with closing(peers_of(pair, "vllm")[0]) as peer:
            peer.open()
            texts.append(peer.decode(tuple(range(5, 14)), 12))
        files = [path.stat() for path in tmp_path.glob("torch_compile_cache/**/model")]
        made.append([(file.st_ino, file.st_mtime_ns) for file in files])
    assert texts[0] == texts[1]
    assert made[0]
    # What vLLM does by itself. Were it mended, the repair could go.
    assert (made[0] == made[1]) == repaired
