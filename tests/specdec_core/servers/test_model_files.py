"""Each program gets an EAGLE head as it reads it, or none."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, parse
from specdec_core.models.eagle import EagleOneHead, EagleSettings
from specdec_core.search.nearest import counterpart_or_nearest
from specdec_core.servers.answers import served_pair
from specdec_core.servers.model_files import models_of
from specdec_core.servers.server import DraftFile
from specdec_core.servers.table import SERVERS
from tests.specdec_core.models.eagle.pair_heads import save_head_of
from tests.specdec_core.models.reduced_draft.drafts import write_draft

CHAIN = {"kind": "draft_model", "draft": "head", "policy": {"kind": "fixed", "max_tokens": 4}}


def exported(server, models, configuration):
    """Find the settings of a server; fails where a replay looks for the nearest."""

    def by_replay(*_):
        pytest.fail("the nearest was looked for")

    counterpart_or_nearest(SERVERS[server], models, configuration, by_replay)


def head_file(pair, folder, server):
    drafts = {**pair.spec.drafts, "head": str(folder)}
    spec = pair.spec.model_copy(update={"drafts": drafts})
    return models_of(spec, SERVERS[server]).drafts["head"]


def test_a_servers_pair_has_the_weights_of_drafts_only_where_they_are_asked_for(tiny_spec):
    alone, beside = served_pair(tiny_spec), served_pair(tiny_spec, drafts=True)
    assert alone.drafts == {}
    assert beside.drafts["draft"].device.type == "cpu"
    assert {pair.target.device.type for pair in (alone, beside)} == {"meta"}


def eagle_one(pair, folder, architecture):
    """A head of EAGLE-1 as its authors keep it, or as SGLang does."""
    config = pair.target.config
    settings = EagleSettings.for_target(config, config.vocab_size, feature_layers=(2,))
    values = settings.layer_config().to_dict() | {"architectures": [architecture], "head_dim": None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(dict(EagleOneHead(settings).state_dict()), folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_draft_with_a_reduced_vocabulary_is_written_as_a_plain_one(tiny_pair, tmp_path):
    """Our plug-ins read it as it is. For another target it is refused, when it is asked for."""
    write_draft(tiny_pair.spec, tmp_path / "draft", list(range(1, 300, 3)))
    name = str(tmp_path / "draft")
    spec = tiny_pair.spec.model_copy(update={"drafts": {"head": name}})
    written = models_of(spec, SERVERS["vllm"]).drafts["head"]
    assert (written.kind, written.padded) == ("model", False)
    config = json.loads((Path(written.place) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert models_of(spec, SERVERS["vllm"], plug_in=True).drafts["head"].place == name
    other = spec.model_copy(update={"target": tiny_pair.spec.drafts["draft"]})
    models = models_of(other, SERVERS["transformers"])
    own = parse(Configuration, {"drafter": CHAIN}, "test")
    with pytest.raises(UserError, match=r"vLLM cannot load .*trained for another target"):
        exported("vllm", models, own)


@pytest.mark.parametrize("form", ["speculators", "int8"])
def test_a_head_of_ours_is_written_for_those_that_read_it(tiny_pair, tmp_path, form):
    save_head_of(tiny_pair, tmp_path / "head", form, feature_layers=(1,))
    for server, architecture in (
        ("vllm", "Eagle3DraftModel"),
        ("sglang", "LlamaForCausalLMEagle3"),
        ("trtllm", "LlamaForCausalLMEagle3"),
    ):
        draft = head_file(tiny_pair, tmp_path / "head", server)
        assert (draft.kind, draft.layers) == ("eagle3", (1,))
        config = json.loads((Path(draft.place) / "config.json").read_text())
        assert config["architectures"] == [architecture]
        assert "fc.weight" in load_file(Path(draft.place) / "model.safetensors")  # not packed
    stored = head_file(tiny_pair, Path(draft.place), "sglang")
    assert stored == DraftFile(draft.place, "eagle3")  # as it is
    assert head_file(tiny_pair, tmp_path / "head", "transformers").kind == "other"


def test_a_head_is_written_without_the_targets_weights(tiny_pair, tmp_path):
    save_head_of(tiny_pair, tmp_path / "head", feature_layers=(1,))
    shutil.copytree(tiny_pair.spec.target, tmp_path / "target")
    for weights in (tmp_path / "target").glob("*.safetensors"):
        weights.unlink()
    models = {"target": str(tmp_path / "target"), "drafts": {"head": str(tmp_path / "head")}}
    spec = tiny_pair.spec.model_copy(update=models)
    for server in ("vllm", "sglang", "llama_cpp"):
        head = models_of(spec, SERVERS[server]).drafts["head"]
        assert (head.kind, head.refused) == ("eagle3", None)


def test_sglang_is_told_which_generation_a_head_is_of(tiny_pair, tmp_path):
    folder = eagle_one(tiny_pair, tmp_path / "its own", "LlamaForCausalLMEagle")
    assert head_file(tiny_pair, folder, "sglang") == DraftFile(str(folder), "eagle")


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 2}, {"quantization_config": {"quant_method": "fp8"}}], ids=str
)
def test_a_head_that_only_sglang_reads_is_refused_where_its_layers_are_asked_for(
    tiny_pair, tmp_path, changes
):
    folder = tmp_path / "head"
    save_head_of(tiny_pair, folder, "specforge", feature_layers=(1,))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert head_file(tiny_pair, folder, "sglang") == DraftFile(str(folder), "eagle3")
    refused = head_file(tiny_pair, folder, "trtllm")
    assert (refused.kind, refused.refused is None) == ("other", False)


@pytest.mark.parametrize(
    ("server", "architecture"),
    [
        ("vllm", "LlamaForCausalLM"),
        ("sglang", "LlamaForCausalLM"),
        ("trtllm", "LlamaForCausalLM"),
        ("trtllm", "LlamaForCausalLMEagle"),  # as SGLang reads it
    ],
)
def test_a_head_that_a_server_cannot_load_is_refused(tiny_pair, tmp_path, server, architecture):
    """It is not replaced by what comes nearest; other drafts of the pair are not affected."""
    folder = eagle_one(tiny_pair, tmp_path / "head", architecture)
    drafts = {"head": str(folder), **tiny_pair.spec.drafts}
    spec = tiny_pair.spec.model_copy(update={"drafts": drafts})
    models = models_of(spec, SERVERS[server])
    own = parse(Configuration, {"drafter": CHAIN}, "test")
    with pytest.raises(UserError, match=r"cannot load .*EAGLE-1"):
        exported(server, models, own)
    other = parse(Configuration, {"drafter": CHAIN | {"draft": "draft"}}, "test")
    exported(server, models, other)
