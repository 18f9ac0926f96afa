"""A fingerprint names the weights, wherever they lie, and notices when they change."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_core.base import digests as module
from specdec_core.base.bundled import bundled_path
from specdec_core.base.errors import UserError
from specdec_core.models.fingerprints import fetch_weights, fingerprint

WEIGHTS = "model.safetensors"


@pytest.fixture(params=["whole", "sampled"])
def model(request, tiny_pair_folders, tmp_path, monkeypatch):
    """A model to change, read whole or as if it were large."""
    if request.param == "sampled":
        monkeypatch.setattr(module, "WHOLE", 0)
    return Path(shutil.copytree(tiny_pair_folders["target"], tmp_path / "model"))


def test_a_copy_elsewhere_has_the_same_fingerprint(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "deep" / "other")
    assert fingerprint(str(copy)) == fingerprint(str(model))
    (copy / "README.md").write_text("new")
    assert fingerprint(str(copy)) == fingerprint(str(model))


def test_noise_and_another_header_or_size_or_shape_change_it(model):
    seen = {fingerprint(str(model))}
    tensors = load_file(model / WEIGHTS)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] += 1e-3 * torch.randn_like(tensors[name])
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    seen.add(fingerprint(str(model)))
    save_file(load_file(model / WEIGHTS), model / WEIGHTS, metadata={"format": "xx"})
    seen.add(fingerprint(str(model)))
    with (model / WEIGHTS).open("ab") as weights:
        weights.write(b"\0")
    seen.add(fingerprint(str(model)))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    seen.add(fingerprint(str(model)))
    assert len(seen) == 5


def test_a_model_that_is_saved_again_is_the_same(model):
    before = fingerprint(str(model))
    config = json.loads((model / "config.json").read_text())
    config = {**dict(reversed(config.items())), "transformers_version": "9", "_name_or_path": "x"}
    (model / "config.json").write_text(json.dumps(config))
    assert fingerprint(str(model)) == before


def test_every_shard_of_a_model_counts(model):
    tensors = list(load_file(model / WEIGHTS).items())
    half = len(tensors) // 2
    (model / WEIGHTS).unlink()
    files = {"model-1.safetensors": tensors[:half], "model-2.safetensors": tensors[half:]}
    for file, part in files.items():
        save_file(dict(part), model / file)
    index = {"weight_map": {name: file for file, part in files.items() for name, _ in part}}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    before = fingerprint(str(model))
    save_file({name: tensor + 1 for name, tensor in tensors[half:]}, model / "model-2.safetensors")
    assert fingerprint(str(model)) != before
    (model / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-1\.safetensors: no such file"):
        fingerprint(str(model))


@pytest.mark.parametrize("sharded", [False, True])
def test_the_weights_of_a_hub_model_are_downloaded_once_and_no_other_file(
    sharded, tiny_pair_folders, tmp_path, monkeypatch
):
    hub = Path(shutil.copytree(tiny_pair_folders["target"], tmp_path / "hub"))
    files = {"config.json", WEIGHTS}
    if sharded:
        (hub / WEIGHTS).rename(hub / "model-1.safetensors")
        index = {"weight_map": {"a": "model-1.safetensors"}}
        (hub / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        files = {"config.json", f"{WEIGHTS}.index.json", "model-1.safetensors"}
    (hub / "pytorch_model.bin").write_bytes(b"the same again")
    cache, asked = tmp_path / "cache", []
    cache.mkdir()

    def download(name, local_files_only=False, allow_patterns=()):
        assert name == "some/model"
        if not local_files_only:
            asked.append(allow_patterns)
        for file in allow_patterns:
            shutil.copy(hub / file, cache)
        return str(cache)

    there = [file.name for file in hub.iterdir()]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name: there)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for _ in range(2):
        fetch_weights("some/model")
    assert {file.name for file in cache.iterdir()} == files
    assert len(asked) == 2
    assert fingerprint("some/model") == fingerprint(str(hub))


def test_large_files_are_not_read_whole(tmp_path):
    shutil.copy(bundled_path("target") / "config.json", tmp_path)
    with (tmp_path / WEIGHTS).open("wb") as weights:
        weights.truncate(2**40)  # sparse; hashing a terabyte would take half an hour
    assert fingerprint(str(tmp_path)) == fingerprint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such-model", "no such folder, and no model of that name in the hub's cache"),
        ("{}/nothing", "no such folder"),
        ("{}", "config.json: no such file"),
    ],
)
def test_missing_models_are_one_line(tmp_path, name, message):
    with pytest.raises(UserError, match=message) as caught:
        fingerprint(name.format(tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_weights_are_one_line(model):
    (model / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"no weights in .* \(model\.safetensors or"):
        fingerprint(str(model))
    (model / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        fingerprint(str(model))
