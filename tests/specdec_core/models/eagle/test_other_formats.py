"""Heads of SpecForge and of EAGLE's authors, made from random ones by their names and keys."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specdec_core.base.errors import UserError
from specdec_core.models.eagle import EagleHead
from specdec_core.models.eagle.loading import is_head, load_head
from tests.specdec_core.models.eagle.heads import (
    DRAFTED,
    LAYERS,
    VOCABULARY,
    WIDTH,
    outputs,
    random_head,
    random_one,
    target_config,
)


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
    for before, after in zip(outputs(head), outputs(loaded), strict=True):
        assert torch.equal(before, after)
    return loaded


SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFTED,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, LAYERS // 2, LAYERS - 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}, (1, 4, 8)),
        ({"attention_bias": True, "mlp_bias": True}, (2, 4, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
    ],
)
def test_specforge(tmp_path, changes, layers):
    folder = written(tmp_path / "head", random_head(), **SPECFORGE, **changes)
    assert same(folder, random_head()).settings.feature_layers == layers


def test_specforge_of_the_whole_vocabulary(tmp_path):
    head = random_head(VOCABULARY)
    folder = written(
        tmp_path / "head",
        head,
        **{**SPECFORGE, "draft_vocab_size": None},
        tie_word_embeddings=False,
    )
    same(folder, head)


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
        (True, False, {}),
        (False, False, {"bias": False}),
        (True, True, {"bias": True, "qkv_bias": True}),
    ],
)
def test_eagle_one(tmp_path, fc_bias, qkv_bias, keys):
    head = random_one(fc_bias, qkv_bias)
    loaded = same(written(tmp_path / "head", head, torch_file=qkv_bias, **keys), head)
    assert loaded.settings.feature_layers == (LAYERS,)


def test_eagle_one_with_its_embedding_and_frequencies(tmp_path):
    """Of older checkpoints."""
    head = random_one()
    folder = written(tmp_path / "head", head)
    head.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
    more: dict[str, Tensor] = {
        "embed_tokens.weight": head.embed_tokens.weight,
        "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file)
    loaded = load_head(str(folder), target_config())
    assert isinstance(loaded.embed_tokens, nn.Embedding)
    assert torch.equal(loaded.embed_tokens.weight, head.embed_tokens.weight)


def test_a_small_draft_model_is_no_head(tmp_path):
    """With one layer, its configuration is that of an EAGLE-1 head."""
    LlamaForCausalLM(target_config(num_hidden_layers=1)).save_pretrained(tmp_path)
    assert not is_head(tmp_path)
    with pytest.raises(UserError, match="not an EAGLE head"):
        load_head(str(tmp_path), target_config())
