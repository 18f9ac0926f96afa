"""llama.cpp's server decodes what this engine decodes, gives its tokens, and times its steps."""

import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from specdec_core.base.bundled import resolve_path
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, PairSpec, RunnerSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import save_head
from specdec_core.models.loading import load_config
from specdec_core.models.pair import load_pair
from specdec_core.servers.completions import AnswerServer
from specdec_core.servers.llama_cpp import process
from specdec_core.servers.llama_cpp import profile as times
from specdec_core.servers.llama_cpp.conversion import gguf_of
from specdec_core.servers.model_files import models_of
from specdec_core.servers.process import running
from specdec_core.servers.server import Mode
from specdec_core.servers.table import SERVERS
from tests.observers import Heard

LLAMA_CPP = SERVERS["llama_cpp"]
MISSING = process.missing()
built = pytest.mark.skipif(MISSING is not None, reason=f"llama.cpp: {MISSING}")
PROMPTS = [list(range(20, 60)), [30, 31, 32, 33] * 8, list(range(90, 40, -1))]
CHAIN = DraftModelSettings(policy=FixedSettings(max_tokens=3))
LOOKUP = PromptLookupSettings(min_ngram=2, max_ngram=2, max_tokens=4)
DRAFTERS = {
    "draft model": CHAIN,
    "n-gram": LOOKUP,
    "first n-gram": LOOKUP.model_copy(update={"occurrence": "earliest"}),
    "shared n-gram": SuffixSettings(memory="all", per_match=0, min_match=4, max_tokens=6),
    "both": HybridSettings(lookup=LOOKUP, otherwise=CHAIN, min_match=2),
}


@pytest.fixture(scope="module")
def pair():
    """The bundled pair, in float32."""
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=512)
    return load_pair(PairSpec(drafts={"small": "bundled:draft-small"}, runner=runner))


@contextmanager
def server_in(mode, pair, folder):
    served = LLAMA_CPP.served(pair, mode, (), folder)
    with running(served.process(mode.name, 3)) as url:
        server = AnswerServer(url, pair.tokenizer, pair.eos_token_ids)
        assert server._llama_cpp
        yield server
        server.close()


def answers_here(pair):
    requests = [Request(str(n), tuple(prompt), 32) for n, prompt in enumerate(PROMPTS)]
    return [list(each.tokens) for each in Engine(pair, AUTOREGRESSIVE, 3).generate(requests)]


@pytest.fixture
def with_program(monkeypatch, tmp_path, tiny_pair):
    """Makes a script the `llama-server` that is found; returns a pair with a target in GGUF, and
    the settings of a mode with a draft in it."""

    def made(script):
        (tmp_path / "bin").mkdir()
        program, file = tmp_path / "bin" / "llama-server", tmp_path / "model.gguf"
        program.write_text(script)
        program.chmod(0o755)
        file.write_bytes(b"GGUF")
        monkeypatch.setattr(process, "FOLDER", tmp_path)
        given = replace(tiny_pair, spec=tiny_pair.spec.model_copy(update={"target": str(file)}))
        return given, {"spec-type": "draft-simple", "spec-draft-model": str(file)}

    return made


def test_what_is_missing_is_one_line(monkeypatch, bare_home, tiny_pair):
    monkeypatch.setattr(process, "FOLDER", bare_home / "none")
    monkeypatch.setenv("PATH", str(bare_home))
    with pytest.raises(UserError, match=r"llama.cpp: no llama-server in .*`make llama-cpp` builds"):
        LLAMA_CPP.served(tiny_pair, Mode("llama.cpp", {}), (), bare_home)


def test_a_gguf_file_is_used_as_it_is_and_other_models_need_the_script(
    monkeypatch, tmp_path, tiny_pair
):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert gguf_of(str(file), "float32", tmp_path / "none.py") == file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"by hand: python .*none\.py .*target --outtype f32"):
        gguf_of(tiny_pair.spec.target, "float32", tmp_path / "none.py")


def test_a_server_is_started_with_its_slots_cores_and_data_types(
    monkeypatch, tmp_path, with_program
):
    monkeypatch.setenv("LLAMA_ARG_THREADS", "99")
    said = "version: 0.6.0-dev (build 11434, commit unknown)"
    given, settings = with_program(f"#!/bin/sh\necho '{said}' >&2\n")
    served = LLAMA_CPP.served(given, Mode("chain", settings), (1, 3), tmp_path)
    assert served.version == "llama.cpp b11434"
    assert "LLAMA_ARG_THREADS" not in served.environment
    command = served.command(4, 8123)
    assert command[0] == str(tmp_path / "bin" / "llama-server")
    for option, value in {
        "--model": given.spec.target,
        "--spec-draft-model": given.spec.target,
        "--port": "8123",
        "--parallel": "4",
        "--ctx-size": "1024",
        "--cpu-mask": "0xa",
        "--spec-draft-cpu-mask": "0xa",
        "--cache-type-k": "f32",
        "--spec-draft-type-v": "f32",
    }.items():
        assert command[command.index(option) + 1] == value


# Without a draft that it can use, it answers all the same.
WITHOUT = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if sys.argv[1:] == ["--version"]:
    sys.exit("version: 1 (build 11434, commit unknown)")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.give([{{"id": 0, "speculative": "--spec-draft-model" not in sys.argv}}])
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.give({{"timings": {{"predicted_ms": 8, "prompt_ms": 1, "draft_n": 8}}}})
    def give(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
print("failed to initialize speculative decoding context: other vocabulary", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_that_cannot_use_its_draft_is_not_ready(tmp_path, with_program):
    given, settings = with_program(WITHOUT.format(python=sys.executable))
    chain = LLAMA_CPP.served(given, Mode("chain", settings), (), tmp_path).process("chain", 1)
    with (
        pytest.raises(UserError, match=r"^chain: its server decodes without .*: other vocabulary"),
        running(chain),
    ):
        pass
    with running(LLAMA_CPP.served(given, Mode("plain", {}), (), tmp_path).process("plain", 1)):
        pass


def test_a_draft_that_it_cannot_use_is_left_out_of_the_profile(
    tiny_pair, monkeypatch, with_program
):
    with_program(WITHOUT.format(python=sys.executable))
    monkeypatch.setattr(process, "gguf_of", lambda model, *_: model)  # nothing reads it
    monkeypatch.setattr(times, "LENGTHS", (1, 3))
    heard = Heard()
    profile = times.profile_llama_cpp(
        LLAMA_CPP, tiny_pair, widths=(1,), contexts=(64,), batches=(1, 2), repeats=1, observer=heard
    )
    assert profile.drafts == {}
    assert profile.device == "cpu, llama.cpp b11434"
    [warning] = heard.warnings
    assert warning.startswith("no step costs of draft: llama.cpp draft: its server decodes without")


@built
def test_every_way_to_draft_writes_what_this_engine_writes(pair, tmp_path):
    models = models_of(pair.spec, LLAMA_CPP, dtype=torch.float32)
    modes = [Mode("plain", {}), *LLAMA_CPP.compared(DRAFTERS, models)]
    assert len(modes) == 1 + len(DRAFTERS)
    expected = answers_here(pair)
    for mode in modes:
        with server_in(mode, pair, tmp_path) as server:
            found = [server.complete(prompt, 32) for prompt in PROMPTS]
            assert found == expected, mode.name
            assert (server.candidates == 0) == mode.autoregressive, mode.name


@built
def test_an_eagle_head_is_converted_and_loaded(pair, tmp_path):
    name = resolve_path("bundled:target")
    torch.manual_seed(0)
    head = EagleHead(EagleSettings.for_target(load_config(name), 1000))
    head.propose_only(torch.randperm(4096)[:1000].sort().values)
    card = EagleCard(target=name, target_fingerprint="0" * 16, speculative_tokens=3)
    save_head(head, tmp_path / "head", card)
    settings = {
        "spec-type": "draft-eagle3",
        "spec-draft-model": str(tmp_path / "head"),
        "spec-draft-n-max": 3,
    }
    with server_in(Mode("head", settings), pair, tmp_path) as server:
        assert [server.complete(prompt, 32) for prompt in PROMPTS] == answers_here(pair)


@built
def test_its_steps_are_timed(monkeypatch, pair):
    for name, value in {"LENGTHS": (1, 3), "PROMPTS": (16, 256), "STEPS": 3}.items():
        monkeypatch.setattr(times, name, value)
    profile = times.profile_llama_cpp(
        LLAMA_CPP, pair, widths=(1,), contexts=(64,), batches=(1, 2), repeats=1
    )
    assert profile.device.startswith("cpu, llama.cpp b")
    assert not profile.whole_chains
    assert 0 < profile.t_target() < 1
    assert set(profile.drafts) == {"small"}
    assert profile.prefill_seconds([256]) > profile.prefill_seconds([16])


def assert_ends(pair, mode, folder, reason):
    """The mode's server ends before it is ready, for this reason."""
    served = LLAMA_CPP.served(pair, mode, (), folder).process(mode.name, 1)
    with pytest.raises(UserError, match=f"^{mode.name}: its server {reason}"), running(served):
        pass


@built
def test_a_server_that_does_not_start_says_why(pair, tmp_path):
    assert_ends(pair, Mode("wrong", {"spec-type": "none-such"}), tmp_path, "ended: .*none-such")


@built
def test_a_draft_that_it_cannot_use_is_said(pair, tmp_path):
    draft = gguf_of(resolve_path("bundled:draft-small"), "float32", process.conversion_script())
    settings = {"spec-type": "draft-eagle3", "spec-draft-model": str(draft), "spec-draft-n-max": 3}
    assert_ends(pair, Mode("no head", settings), tmp_path, ".*not eagle3")
