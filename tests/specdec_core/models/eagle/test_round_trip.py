"""Heads are saved, loaded and read from other programs' formats unchanged."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from specdec_core.base.errors import UserError
from specdec_core.models.eagle import EagleHead
from specdec_core.models.eagle.formats import specforge
from specdec_core.models.eagle.loading import is_head, load_head, names_head, read_card, save_head
from tests.specdec_core.models.eagle.heads import (
    CARD,
    DRAFTED,
    LAYERS,
    VOCABULARY,
    WIDTH,
    outputs,
    random_head,
    random_one,
    target_config,
)


def loaded(folder, dtype=torch.float32):
    head = load_head(str(folder), target_config(), CARD.target_fingerprint, dtype)
    assert not head.training
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafted", [DRAFTED, VOCABULARY])
@pytest.mark.parametrize("variant", [False, True])
def test_every_output_is_the_same(tmp_path, dtype, drafted, variant):
    head = random_head(
        drafted,
        norm_before_residual=variant,
        norm_before_fc=variant,
        attention_bias=variant,
        mlp_bias=variant,
        feature_layers=(1, 4) if variant else (0, 3, 6, 9),
    )
    frequencies = head.rotary.inv_freq.clone()
    for weights in head.parameters():  # not head.to: rotary frequencies are for float32
        weights.data = weights.data.to(dtype)
    save_head(head, tmp_path / "head", CARD, dtype=dtype)
    assert is_head(tmp_path / "head")
    other = loaded(tmp_path / "head", dtype)
    assert other.settings == head.settings
    assert torch.equal(other.rotary.inv_freq, frequencies)
    assert other.embed_tokens is None
    assert {after.dtype for after in outputs(other)} == {dtype}
    assert all(map(torch.equal, outputs(head), outputs(other)))
    assert torch.equal(head.t2d, other.t2d)
    assert read_card(str(tmp_path / "head")) == CARD


SCALED = {"rope_type": "linear", "rope_theta": 9000.0, "factor": 2.0}


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": SCALED, "feature_layers": (1, 8)}])
def test_what_sglang_reads_is_the_same_head(tmp_path, changes):
    head = random_head(**changes)
    assert specforge.lacks(head.settings, LAYERS) is None
    save_head(head, tmp_path / "head", CARD, form="specforge", dtype=torch.float32)
    other = load_head(str(tmp_path / "head"), target_config())
    assert other.settings == head.settings
    assert all(map(torch.equal, outputs(head), outputs(other)))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert "midlayer.self_attn.q_proj.weight" in tensors


@pytest.mark.parametrize(
    "changes", [{"norm_before_fc": True}, {"mlp_bias": True}, {"feature_layers": (LAYERS,)}]
)
def test_what_sglang_has_no_place_for_is_told(changes):
    assert specforge.lacks(random_head(**changes).settings, LAYERS)


def test_offsets_are_left_out_of_a_whole_vocabulary(tmp_path):
    """vLLM has no place for them then."""
    save_head(random_head(VOCABULARY), tmp_path, CARD)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    assert loaded(tmp_path).t2d.all()


def test_defaults_that_differ_are_written(tmp_path):
    """What *speculators* and vLLM take for missing keys is not the same."""
    save_head(random_head(), tmp_path, CARD)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert config["norm_before_fc"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["target_hidden_size"] == WIDTH
    layer = config["transformer_layer_config"]
    assert layer["num_aux_hidden_states"] == 3
    assert layer["num_hidden_layers"] == 1
    assert layer["rope_parameters"]["rope_theta"] == 5000.0
    assert config["speculators_config"]["verifier"]["name_or_path"] == CARD.target
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


@pytest.mark.parametrize("form", ["speculators", "int8"])
def test_an_embedding_of_its_own(tmp_path, form):
    head = random_head()
    head.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
    save_head(head, tmp_path / "shared", CARD, form=form)
    assert loaded(tmp_path / "shared").embed_tokens is None
    save_head(head, tmp_path / "own", CARD, form=form, dtype=torch.float32, embedding=True)
    own = loaded(tmp_path / "own").embed_tokens
    weights = head.embed_tokens.weight
    assert (own.weight - weights).abs().amax() <= (0 if form == "speculators" else 0.02)


def test_int8_is_close_in_every_channel(tmp_path):
    head = random_head()
    with torch.no_grad():
        head.fc.weight[0] = 0  # a channel without a scale
        head.fc.weight[1] *= 1e-4
        head.fc.weight[2, 5] = 30.0
    save_head(head, tmp_path, CARD, form="int8", dtype=torch.float32)
    other = loaded(tmp_path)
    state = other.state_dict()
    for name, weights in head.state_dict().items():
        if weights.ndim < 2:
            assert torch.equal(weights, state[name]), name
            continue
        most = weights.abs().amax(1, keepdim=True)
        assert ((weights - state[name]).abs() <= most / 127 * 0.502).all(), name
    for before, after in zip(outputs(head), outputs(other), strict=True):
        assert (before - after).norm() <= 0.05 * before.norm()


def test_weights_in_shards_and_in_torch_files(tmp_path):
    head = random_head()
    save_head(head, tmp_path, CARD, dtype=torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert all(map(torch.equal, outputs(head), outputs(loaded(tmp_path))))
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    where = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for part in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert all(map(torch.equal, outputs(head), outputs(loaded(tmp_path))))


def test_a_head_in_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--head"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    save_head(random_head(), repository / "snapshots" / ("0" * 40), CARD, dtype=torch.float32)
    head = load_head("some/head", target_config())
    assert all(map(torch.equal, outputs(head), outputs(random_head())))
    with pytest.raises(UserError, match="other/head: cannot be had from the hub: "):
        load_head("other/head", target_config())


def test_of_a_model_on_the_hub_the_configuration_tells_that_it_is_no_head(tmp_path, monkeypatch):
    """Nothing else is fetched: its weights may be large."""
    asked = []

    def had(name, file):
        asked.append(file)
        if name == "not/there":
            raise OSError("not a repository")
        (tmp_path / file).write_text(target_config().to_json_string())
        return str(tmp_path / file)

    monkeypatch.setattr("transformers.utils.cached_file", had)
    assert not names_head("some/model")
    assert not names_head("not/there")
    assert not names_head("./not-there")  # a path: the hub would be tried again for seconds
    assert asked == ["config.json", "config.json"]
    save_head(random_head(), tmp_path, CARD)
    assert names_head(str(tmp_path))


def written(folder, head, torch_file=False, **changes):
    """A folder with the keys and names of EAGLE's authors, as of transformers 4."""
    settings = head.settings
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "max_position_embeddings": settings.max_position_embeddings,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": settings.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": settings.rope_parameters["rope_theta"],
        "torch_dtype": "float16",
        "vocab_size": settings.vocab_size,
        **changes,
    }
    tensors = dict(head.state_dict())
    if isinstance(head, EagleHead):
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if torch_file:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def same(folder, head):
    assert is_head(folder)
    loaded = load_head(str(folder), target_config())
    assert type(loaded) is type(head)
    assert all(map(torch.equal, outputs(head), outputs(loaded)))
    return loaded


SPECFORGE: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16}
SPECFORGE["draft_vocab_size"] = DRAFTED


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, LAYERS // 2, LAYERS - 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}, (1, 4, 8)),
        ({"attention_bias": True, "mlp_bias": True}, (2, 4, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
        ({"draft_vocab_size": None, "tie_word_embeddings": False}, (2, 4, 6)),
    ],
)
def test_specforge(tmp_path, changes, layers):
    keys = SPECFORGE | changes
    head = random_head(keys["draft_vocab_size"] or VOCABULARY)
    assert same(written(tmp_path / "head", head, **keys), head).settings.feature_layers == layers


def test_eagle_three_of_its_authors(tmp_path):
    """Their attention's heads divide the width; embeddings may be present."""
    head = random_head(head_dim=WIDTH // 4)
    folder = written(tmp_path / "head", head, draft_vocab_size=DRAFTED)
    loaded = same(folder, head)
    assert loaded.settings.feature_layers == (2, 4, 6)
    assert not loaded.settings.norm_before_residual


def test_eagle_three_of_a_wider_target(tmp_path):
    head = random_head(hidden_size=24, num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    head.embed_tokens = nn.Embedding(VOCABULARY, 24)
    folder = written(tmp_path / "head", head, draft_vocab_size=DRAFTED, target_hidden_size=WIDTH)
    assert same(folder, head).embed_tokens is not None


@pytest.mark.parametrize(
    ("fc_bias", "qkv_bias", "keys"),
    [
        (1, 0, {}),
        (0, 0, {"bias": False}),
        (1, 1, {"bias": True, "qkv_bias": True}),
        (1, 0, {"model_type": "mixtral"}),
        (1, 1, {"model_type": "qwen2"}),
        (1, 0, {"model_type": "qwen2", "qkv_bias": False}),
    ],
)
def test_eagle_one(tmp_path, fc_bias, qkv_bias, keys):
    head = random_one(bool(fc_bias), bool(qkv_bias))
    loaded = same(written(tmp_path / "head", head, torch_file=qkv_bias, **keys), head)
    assert loaded.settings.feature_layers == (LAYERS,)


def test_eagle_one_with_its_embedding_and_frequencies(tmp_path):
    """Of older checkpoints."""
    head = random_one()
    folder = written(tmp_path / "head", head)
    head.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
    more = {"embed_tokens.weight": head.embed_tokens.weight}
    more["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    file = folder / "model.safetensors"
    save_file(load_file(file) | more, file)
    loaded = load_head(str(folder), target_config())
    assert torch.equal(loaded.embed_tokens.weight, head.embed_tokens.weight)


@pytest.mark.parametrize(
    ("head", "changes"),
    [(random_one, {}), (random_head, {"draft_vocab_size": DRAFTED})],
)
def test_a_head_with_another_layer_is_told_by_its_kind(tmp_path, head, changes):
    """Not by the tokenizer that a head lacks."""
    folder = written(tmp_path / "head", head(), model_type="gemma2", **changes)
    assert is_head(folder)
    with pytest.raises(UserError, match="layer is of the kind 'gemma2'; only llama's is read"):
        load_head(str(folder), target_config())


def test_a_small_draft_model_is_no_head(tmp_path):
    """With one layer, its configuration is that of an EAGLE-1 head."""
    LlamaForCausalLM(target_config(num_hidden_layers=1)).save_pretrained(tmp_path)
    assert not is_head(tmp_path)
    with pytest.raises(UserError, match="not an EAGLE head"):
        load_head(str(tmp_path), target_config())
