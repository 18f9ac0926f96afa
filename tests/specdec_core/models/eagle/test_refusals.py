"""A head that does not fit is refused in one line that says what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_core.base.errors import UserError
from specdec_core.models.eagle.loading import is_head, load_head, save_head
from specdec_core.models.pair import check_pair
from tests.specdec_core.models.eagle.heads import (
    CARD,
    DRAFTED,
    VOCABULARY,
    WIDTH,
    random_head,
    target_config,
)


@pytest.fixture
def folder(tmp_path):
    save_head(random_head(), tmp_path / "head", CARD)
    return tmp_path / "head"


def refused(folder, message, **target):
    with pytest.raises(UserError, match=message) as error:
        load_head(str(folder), target_config(**target))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{folder}: ")


def configure(folder, **changes):
    """Change keys of the configuration; None removes one, `layer__…` is one of the layer's."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        part = config["transformer_layer_config"] if key.startswith("layer__") else config
        part.pop(key.removeprefix("layer__"), None)
        if value is not None:
            part[key.removeprefix("layer__")] = value
    (folder / "config.json").write_text(json.dumps(config))


def change(folder, how):
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": 64}, f"hidden states of width {WIDTH}, not 64"),
        ({"vocab_size": 61}, f"a vocabulary of {VOCABULARY}, not 61"),
        ({"num_hidden_layers": 5}, r"reads the layers \[2, 4, 6\]: .* from 0 to 5"),
    ],
)
def test_another_target(folder, target, message):
    refused(folder, message, **target)


def test_other_weights_of_the_target(folder):
    with pytest.raises(UserError, match=r"trained for another target .*0123456789abcdef.*fedc"):
        load_head(str(folder), target_config(), "fedc")
    load_head(str(folder), target_config(), CARD.target_fingerprint)
    configure(folder, specdec=None)  # a head from elsewhere does not say
    load_head(str(folder), target_config(), "fedc")


def test_what_the_output_layer_reads_is_another_state_for_others(folder):
    """vLLM takes the number of layers for the state before the target's norm."""
    configure(folder, eagle_aux_hidden_state_layer_ids=[2, 4, 9])
    load_head(str(folder), target_config())
    configure(folder, specdec=None)
    refused(folder, "increasing numbers from 0 to 8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 6]}, "increasing numbers from 0 to 9"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 10]}, "increasing numbers"),
        ({"eagle_aux_hidden_state_layer_ids": ["low", 4, 10]}, "feature_layers.0: "),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"fc.weight has the shape \(32, 96\)"),
        ({"norm_before_residual": None}, "norm_before_residual is missing"),
        ({"norm_before_fc": True}, "missing tensors: input_norm.weight"),
        ({"fc_norm": True}, "a draft of EAGLE-3.1, which is not supported"),
        ({"layer__quantization_config": {"quant_method": "gptq"}}, "is quantised"),
        ({"layer__num_hidden_layers": 2}, "has 2 decoder layers"),
        ({"layer__model_type": "qwen3"}, "kind 'qwen3'; only llama's"),
        ({"layer__rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "'spiral'"),
        ({"layer__hidden_size": "wide"}, "hidden_size"),
        ({"layer__intermediate_size": 50}, "has the shape"),
        ({"transformer_layer_config": None}, "no transformer_layer_config"),
        ({"draft_vocab_size": 30}, "d2t is not 30 whole numbers"),
        ({"specdec": {"form": "int8", "colour": 1}}, "colour: unknown key"),
        ({"speculators_model_type": "peagle"}, "a draft of P-EAGLE, which is not supported"),
        ({"speculators_model_type": "mlp"}, "a draft of the kind 'mlp', which is not supported"),
    ],
)
def test_another_configuration(folder, changes, message):
    configure(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 7}}, "DFlash"),
        ({"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"model_type": "llama", "draft_vocab_size": 24, "ptd_token_id": 59}, "P-EAGLE"),
        ({"model_type": "llama", "draft_vocab_size": 24, "fc_norm": True}, "EAGLE-3.1"),
    ],
)
def test_a_draft_of_another_method_is_named_when_it_is_checked(tmp_path, tiny_spec, config, method):
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = tiny_spec.model_copy(update={"drafts": {"draft": str(tmp_path)}})
    with pytest.raises(UserError, match=f"^{tmp_path}: a draft of {method}, which") as error:
        check_pair(spec)
    assert "\n" not in str(error.value)


def set_(name, value):
    return lambda tensors: tensors.update({name: value})


def add(name, place, what):
    def added(tensors):
        tensors[name][place] += what

    return added


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "no output layer"),
        (lambda tensors: tensors.pop("norm.weight"), "missing tensors: norm.weight"),
        (lambda tensors: tensors.pop("d2t"), f"no d2t, which says .* {DRAFTED} .*{VOCABULARY}"),
        (add("d2t", -1, VOCABULARY), "d2t leads outside"),
        (set_("d2t", torch.arange(DRAFTED).flip(0) * 2), "not lead to increasing"),
        (set_("d2t", torch.zeros(DRAFTED)), "d2t is not 24 whole numbers"),
        (lambda tensors: tensors["t2d"].logical_not_(), "t2d and d2t name different tokens"),
        (set_("mask_hidden", torch.zeros(1)), "unknown tensors: mask_hidden"),
        (set_("fc.weight", torch.zeros(WIDTH, 96, dtype=torch.int8)), "fc.weight is quantised"),
        (set_("norm.weight", torch.zeros(7)), r"norm.weight has the shape \(7,\), not \(32,\)"),
        (set_("embed_tokens.weight", torch.zeros(7, WIDTH)), "embed_tokens.weight has the shape"),
    ],
)
def test_other_tensors(folder, how, message):
    change(folder, how)
    refused(folder, message)


def test_int8_without_its_scales_or_that_does_not_say_so(folder):
    save_head(random_head(), folder, CARD, form="int8")
    change(folder, lambda tensors: tensors.pop("fc.weight_scale"))
    refused(folder, "fc.weight: no scale for each of its 32 rows")
    configure(folder, specdec=None)
    refused(folder, "no output layer")


def test_a_narrower_head_without_its_embedding(folder):
    head = random_head(hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    save_head(head, folder, CARD)
    refused(folder, "no embed_tokens, but the target's embedding is 32 wide and the head 24")


@pytest.mark.parametrize("kept", [0, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_torn_weights(folder, name, kept):
    file = folder / name
    if file.suffix == ".bin":
        torch.save(load_file(folder / "model.safetensors"), file)
        (folder / "model.safetensors").unlink()
    file.write_bytes(file.read_bytes()[:kept])
    refused(folder, f"cannot read {name}: ")


def test_no_weights_and_torch_files_that_run_code_are_not_read(folder):
    (folder / "model.safetensors").unlink()
    assert is_head(folder)
    refused(folder, "no weights")
    torch.save({"fc.weight": Path("/")}, folder / "pytorch_model.bin")
    refused(folder, "cannot read pytorch_model.bin: ")


def test_no_head(tmp_path):
    refused(tmp_path / "none", "no such folder")
    refused(tmp_path, "config.json: no such file")
    for content in ("[1]", "{", '{"model_type": "llama", "num_hidden_layers": 1}'):
        (tmp_path / "config.json").write_text(content)
        assert not is_head(tmp_path)
        refused(tmp_path, "config.json is not|not an EAGLE head")
    assert not is_head(tmp_path / "none")


def test_a_head_with_another_vocabulary_is_not_saved(tmp_path):
    head = random_head()
    head.d2t[-1] = VOCABULARY
    with pytest.raises(UserError, match="the head: d2t leads outside"):
        save_head(head, tmp_path / "head", CARD)
    assert not list(tmp_path.iterdir())
