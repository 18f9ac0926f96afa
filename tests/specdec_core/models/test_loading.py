"""Models are loaded whole and as they are, or refused in one line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.models.eager import EagerRunner
from specdec_core.models.loading import load_skeleton, load_weights
from specdec_core.models.pair import check_pair, load_pair, max_length_of
from specdec_core.models.reading import reason
from specdec_core.models.runner import Batch
from specdec_core.models.supported import check_causal, check_supported
from tests.commands import ROOT
from tests.conftest import SHAPE, chat_tokenizer, tiny_tokenizer

WEIGHTS, BIN = "model.safetensors", "pytorch_model.bin"
RUNNER = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=128)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
TWO_LAYERS = {**SHAPE, "intermediate_size": 64, "num_hidden_layers": 2}


def spec_of(folder):
    return PairSpec(target=str(folder), drafts={}, runner=RUNNER)


def refused(folder, pattern):
    with pytest.raises(UserError, match=pattern) as error:
        load_pair(spec_of(folder))
    assert str(error.value).startswith(f"{folder}: ")
    assert "\n" not in str(error.value)


@pytest.fixture
def folder(tiny_pair_folders, tmp_path):
    """A small Llama, to be spoilt."""
    return Path(shutil.copytree(tiny_pair_folders["target"], tmp_path / "model"))


def configure(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_tensors(folder, change):
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


# Weights that are not there


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda own: {k: v for k, v in own.items() if "layers.1." not in k},
            r"missing tensors: model\.layers\.1\.input_layernorm.*, … \(9 in all\)",
        ),
        (
            lambda own: {f"other.{k}": v for k, v in own.items()},
            r"missing tensors: .*; unknown tensors: other\..* in all\)",
        ),
        (
            lambda own: own | {"score.weight": torch.zeros(2, 32)},
            r"unknown tensors: score\.weight$",
        ),
    ],
    ids=["a layer", "a prefix", "one more"],
)
def test_tensors_that_do_not_fit_are_refused(folder, change, message):
    change_tensors(folder, change)
    refused(folder, message)


def test_tensors_of_other_shapes_are_refused(folder):
    configure(folder, intermediate_size=48)
    refused(folder, r"mlp\.down_proj\.weight has the shape \(32, 64\), not \(32, 48\).*6 in all")


def test_a_lost_expert_is_refused(tmp_path):
    transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TWO_LAYERS, num_key_value_heads=2, num_local_experts=4)
    ).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    load_pair(spec_of(tmp_path))
    change_tensors(tmp_path, lambda own: {k: v for k, v in own.items() if "experts.2" not in k})
    refused(tmp_path, "do not fit its configuration: model.layers.0.mlp.experts")


def test_tied_and_computed_tensors_are_neither_missing_nor_unknown(folder):
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.layers.0.self_attn.masked_bias": torch.zeros(1),
    }
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)  # it is tied
    expected = load_pair(spec_of(folder)).target.state_dict()
    change_tensors(folder, lambda own: own | old)
    found = load_pair(spec_of(folder)).target.state_dict()
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


# Reasons that get lost


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rms_norm_eps": 0}, "Field 'rms_norm_eps' expected float, got int"),
        ({"rope_scaling": "linear"}, "'rope_parameters' with value 'linear'"),
        ({"num_attention_heads": 5}, r"\(32\) is not a multiple of the number of .*heads \(5\)"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers' expected int, got str"),
        ({"dtype": "float17"}, r"config\.json: dtype: 'float17' is not known"),
        ({"hidden_act": "relux"}, r"config\.json: hidden_act: 'relux' is not known"),
        ({"model_type": "nosuch"}, "model type `nosuch` but Transformers does not recognize"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            r"code of its own \(trust_remote_code\), .* no option changes that",
        ),
        ({"vocab_size": 100}, "its tokenizer has 320 tokens, but its model 100"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_in_a_configuration_is_one_line(folder, values, message):
    configure(folder, **values)
    refused(folder, message)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantised \(gptq\): .*pip install .*with vLLM"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r"quantised \(compressed-tensors\): .*pip install .*with vLLM",
        ),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format compressed"),
        ({"quant_method": "fp8"}, "in the format fp8, which this engine does not run; .*vLLM"),
        ({"quant_method": "exl2", "bits": 4}, "in the format exl2, which"),
        ({"bits": 4}, "has no `quant_method` attribute"),
    ],
    ids=lambda value: value.get("quant_method", "none") if isinstance(value, dict) else "",
)
def test_a_quantised_checkpoint_that_cannot_be_run_says_its_format(folder, method, message):
    configure(folder, quantization_config=method)
    refused(folder, message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (WEIGHTS, b"\x10" + bytes(7) + b"garbage", "cannot load its weights: .*fetch it again"),
        (WEIGHTS, POINTER, rf"{WEIGHTS} is a Git-LFS pointer, .* \(git lfs pull\)"),
        (BIN, b"garbage" * 100, "cannot load its weights: Unsupported operand.*fetch it again"),
        (BIN, b"", "cannot load its weights: EOFError.*fetch it again"),
        (BIN, POINTER, rf"{BIN} is a Git-LFS pointer"),
        ("tokenizer.json", POINTER, r"tokenizer\.json is a Git-LFS pointer"),
        ("tokenizer.json", b"{}", "cannot load its tokenizer: .*a file is damaged"),
        ("config.json", b"{", "config.json is not a JSON object"),
        ("generation_config.json", b"{", "its generation settings: .*not a valid JSON file"),
    ],
)
def test_a_damaged_file_is_one_line(folder, file, content, message):
    if file == BIN:
        (folder / WEIGHTS).unlink()
    (folder / file).write_bytes(content)
    refused(folder, message)


def test_a_missing_tokenizer_is_said_to_be_missing(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(folder, "there is no tokenizer.json in the folder")


def test_added_tokens_that_a_model_of_text_lacks_are_no_reason(folder):
    """As Gemma 3's token for images."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<image {n}>" for n in range(9)])
    tokenizer.save_pretrained(folder)
    assert len(load_pair(spec_of(folder)).tokenizer) > TWO_LAYERS["vocab_size"]


def test_a_reason_is_the_last_line_that_says_what_is_wrong():
    nested = "Validation error for field 'x':\n    TypeError: expected float, got int\n"
    assert reason(ValueError(nested)) == "expected float, got int"
    advice = "some/model is not a valid model\nIf this is a private one, pass a token\n"
    assert reason(OSError(advice)) == "some/model is not a valid model"
    assert reason(MemoryError()) == "MemoryError"


# Models that are not causal


def bert(causal):
    config = transformers.BertConfig(**TWO_LAYERS, is_decoder=causal)
    return transformers.BertLMHeadModel(config)


def electra(causal):
    config = transformers.ElectraConfig(**TWO_LAYERS, is_decoder=causal)
    return transformers.ElectraForCausalLM(config)


def gemma(causal):
    heads = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**TWO_LAYERS, **heads, use_bidirectional_attention=not causal)
    )


@pytest.mark.parametrize("build", [bert, electra, gemma])
def test_a_model_is_refused_where_it_is_not_causal(build, tmp_path):
    torch.manual_seed(0)
    build(False).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused(tmp_path, "is not causal: later tokens change the logits of earlier ones")
    build(True).save_pretrained(tmp_path)
    load_pair(spec_of(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_as_good_as_each_other_are_no_reason(dtype):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **TWO_LAYERS, num_key_value_heads=2, num_local_experts=8, sliding_window=4
    )
    model = transformers.MixtralForCausalLM(config).to(dtype).eval()
    for name, weight in model.named_parameters():
        if "gate.weight" in name:
            weight.data.zero_()
    check_causal(model, "some/mixtral")


# One door


def test_a_skeleton_has_the_settings_and_shapes_of_its_model(folder):
    skeleton, model = load_skeleton(str(folder)), load_weights(str(folder), torch.float32)
    assert skeleton.num_parameters() == model.num_parameters()
    assert skeleton.generation_config.to_dict() == model.generation_config.to_dict()


def test_models_are_loaded_through_one_door():
    doors = {"specdec_core/models/loading.py", "specdec_core/models/reading.py"}
    # A GGUF file has no separate name; settings and tables are no models.
    doors |= {"specdec_core/models/gguf_files.py", "specdec_core/models/generation_settings.py"}
    loads = re.compile(r"(?<!nn\.Embedding)\.from_(pretrained|config)\((?!\{)")
    rooms = ("specdec_core", "cluster", "dashboards", "jobs")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    found = {str(f.relative_to(ROOT)) for f in files if loads.search(f.read_text())}
    assert found == doors


SHORT = 64  # positions of the Phi-3 with longrope


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.BloomConfig(), "uses ALiBi positions"),
        (transformers.RwkvConfig(), "takes no past_key_values"),
        (transformers.xLSTMConfig(), "takes no past_key_values"),
        (transformers.OpenAIGPTConfig(), "takes no past_key_values"),
        (transformers.GPTNeoConfig(), "has local attention layers"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_that_cannot_be_run_is_refused_by_name(config, reason):
    with pytest.raises(UserError, match=f"{config.model_type} {reason}") as error:
        check_supported(config, "some/model")
    assert "\n" not in str(error.value)
    alike = transformers.GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]])
    check_supported(alike, "some/model")


def test_slots_in_which_longrope_would_change_positions_are_refused(longrope_folder):
    runner = RunnerSettings(max_length=SHORT + 1)
    spec = PairSpec(target=str(longrope_folder), drafts={}, runner=runner)
    assert max_length_of(spec) == SHORT
    with pytest.raises(UserError, match=f"is {SHORT + 1}, and may be {SHORT} at most") as error:
        check_pair(spec)
    assert "\n" not in str(error.value)
    check_pair(spec.model_copy(update={"runner": RunnerSettings(max_length=SHORT)}))


@pytest.mark.parametrize("packs", [True, False])
@torch.inference_mode()
def test_longrope_rows_change_no_positions_of_one_another(longrope_folder, packs):
    """Padding and candidates may lie past what a slot holds."""
    model = transformers.AutoModelForCausalLM.from_pretrained(longrope_folder).eval()
    long, short = [5 + 3 * n % 300 for n in range(SHORT)], [9, 8, 7]
    expected = [model(torch.tensor([text])).logits[0, -1] for text in (long, short)]
    runner = EagerRunner(model, slots=2, max_length=SHORT, packs=packs)
    runner.prefill([0], [long[:-1]])
    beyond = [long[-1], 20, 21, 22]
    output = runner.forward(Batch([0, 1], [beyond, short]))
    torch.testing.assert_close(output.of_row(0)[0], expected[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(output.of_row(1)[-1], expected[1], atol=2e-5, rtol=0)


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}draft\n{% endfor %}"


@pytest.fixture
def pair(tiny_spec, tiny_pair_folders, tmp_path):
    """A pair with a template that ends turns with a token which the generation settings lack."""
    tokenizer = chat_tokenizer(TURNS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["draft"]})
    for name, folder in tiny_pair_folders.items():
        shutil.copytree(folder, tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    models = {"target": str(tmp_path / "target"), "drafts": {"draft": str(tmp_path / "draft")}}
    return load_pair(tiny_spec.model_copy(update=models))


def test_an_answer_ends_with_the_templates_end_of_turn(pair):
    end = pair.tokenizer.convert_tokens_to_ids("draft")
    assert pair.eos_token_ids == {pair.tokenizer.eos_token_id, end}
    likely = Sampling(logit_bias=((end, 100.0),))
    (generation,) = Engine(pair).generate([Request("a", (5, 6, 7), 24, likely)])
    assert (generation.tokens, generation.finish_reason) == ([end], "stop")
