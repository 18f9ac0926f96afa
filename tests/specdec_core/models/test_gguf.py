"""A GGUF file is the model that was written to it."""

import json
import os
import sys
from pathlib import Path

import gguf
import pytest
import torch

from specdec_core.base import digests
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.models.gguf_files import unpacked
from specdec_core.models.location import located
from specdec_core.models.pair import check_pair, load_pair
from tests.conftest import tiny_llama, tiny_tokenizer

HIDDEN, LAYERS, HEADS, KEY_HEADS = 64, 2, 4, 2
QUANTISED = gguf.GGMLQuantizationType.Q8_0
WHOLE = gguf.GGMLQuantizationType.F32
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """A separate folder for what is unpacked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unpacked.cache_clear()
    yield tmp_path / "cache" / "specdec" / "models"
    unpacked.cache_clear()


def swapped(weight, heads):
    """Rows of a rotated projection in the order of llama.cpp: a pair's halves are neighbours."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def written(model, path, kind):
    """`model`, a Llama, as a GGUF file with matrices of this type."""
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocabulary = tokenizer.get_vocab()
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in merges(tokenizer)])
    writer.add_token_types([3, *[1] * (len(vocabulary) - 1)])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        values = tensor.float().numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KEY_HEADS)):
            if part in name:
                values = swapped(values, heads)
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        own = kind if values.ndim > 1 else WHOLE
        writer.add_tensor(to, gguf.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merges(tokenizer):
    found = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [tuple(pair) for pair in found]


@pytest.fixture
def model():
    return tiny_llama(0, HIDDEN, LAYERS, len(tiny_tokenizer()))


@torch.inference_mode()
def logits(model):
    return model(torch.tensor([[5, 60, 7, 81]], device=model.device)).logits[0].float().cpu()


def test_unquantised_weights_give_the_logits_bit_for_bit(model, tmp_path):
    file = written(model, tmp_path / "tiny.gguf", WHOLE)
    runner = RunnerSettings(target_dtype="float32", device="cpu", pack=False)
    pair = load_pair(PairSpec(target=str(file), drafts={}, runner=runner))
    torch.testing.assert_close(logits(pair.target), logits(model), atol=1e-5, rtol=0)
    text = "def main(draft):\n    return 12"
    expected = tiny_tokenizer()
    assert pair.tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    assert pair.tokenizer.chat_template == TEMPLATE
    assert pair.eos_token_ids == {0}
    assert len(pair.fingerprints["target"]) == 16


def test_quantised_weights_are_those_of_the_file_and_unpacked_once(model, tmp_path, kept, caplog):
    file = written(model, tmp_path / "tiny.Q8_0.gguf", QUANTISED)
    folder = Path(located(str(file)))
    assert folder.parent == kept
    assert [path for path in kept.iterdir() if path.is_dir()] == [folder]
    plain = RunnerSettings(pack=False)  # a packed layer has no weight to compare
    read = load_pair(PairSpec(target=str(file), drafts={}, runner=plain)).target
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if values.ndim > 1:  # row by row, so their order does not matter
            values = gguf.dequantize(gguf.quantize(values, QUANTISED), QUANTISED)
        exact = torch.from_numpy(values.copy()).bfloat16().float()
        torch.testing.assert_close(read.state_dict()[name].float().cpu(), exact, atol=0, rtol=0)
    copy = tmp_path / "elsewhere" / "tiny.Q8_0.gguf"
    copy.parent.mkdir()
    os.link(file, copy)
    caplog.clear()
    assert located(str(copy)) == str(folder)
    assert "unpacking" not in caplog.text


def test_an_edit_of_a_large_files_metadata_unpacks_it_anew(model, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "WHOLE", 0)
    monkeypatch.setattr(digests, "BLOCK", 8)  # and between the blocks lies what is edited
    file = written(model, tmp_path / "tiny.gguf", WHOLE)
    before = located(str(file))
    reader = gguf.GGUFReader(file, "r+")
    reader.fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = 3
    reader.data.flush()
    unpacked.cache_clear()  # as in another process
    assert located(str(file)) != before
    assert check_pair(PairSpec(target=str(file), drafts={})).eos_token_id == 3


def test_a_folder_may_have_a_hash_sign_in_its_name(model, tmp_path, monkeypatch):
    folder = tmp_path / "v#2"
    folder.mkdir()
    file = written(model, folder / "tiny.gguf", WHOLE)
    monkeypatch.chdir(tmp_path)
    assert located(str(file)) == located("v#2/tiny.gguf") == located("./v#2/tiny.gguf")
    with pytest.raises(UserError, match=r"v#3/tiny\.gguf: no such file"):
        located(str(tmp_path / "v#3" / "tiny.gguf"))


def test_a_model_in_a_package_is_found_by_the_packages_name(model, tmp_path, monkeypatch):
    site = tmp_path / "site"
    facts = site / "tiny_model-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    (facts / "RECORD").write_text("tiny_model/tiny.gguf,,\ntiny_model/__init__.py,,\n")
    (site / "tiny_model").mkdir()
    written(model, site / "tiny_model" / "tiny.gguf", WHOLE)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    check_pair(PairSpec(target="package:tiny-model", drafts={}))
    with pytest.raises(UserError, match=r"package:other: no Python package 'other' is installed"):
        located("package:other")
    with pytest.raises(UserError, match=r"package:pytest: expected one GGUF file.*found none"):
        located("package:pytest")


def test_what_cannot_be_read_is_one_line(model, tmp_path, kept):
    whole = written(model, tmp_path / "tiny.gguf", WHOLE).read_bytes()
    cut, other = tmp_path / "cut.gguf", tmp_path / "other.gguf"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    other.write_bytes(whole.replace(b"llama", b"lamma"))
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    for file, reason in ((cut, "cut off"), (other, "lamma"), (text, "not a GGUF file")):
        with pytest.raises(UserError, match=rf"{file.name}.*{reason}") as raised:
            check_pair(PairSpec(target=str(file), drafts={}))
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"gone\.gguf: no such file"):
        located(str(tmp_path / "gone.gguf"))
    assert not kept.exists() or not [path for path in kept.iterdir() if path.is_dir()]


def test_without_the_package_that_reads_them_one_line_says_what_to_install(
    model, tmp_path, kept, monkeypatch
):
    file = written(model, tmp_path / "tiny.gguf", WHOLE)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"tiny\.gguf: to read GGUF files, install gguf"):
        located(str(file))
    assert not [path for path in kept.iterdir() if path.is_dir()]
