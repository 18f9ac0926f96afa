"""Digests that identify a model's weights, without reading all of a large model."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from specdec_core.base.digests import files_digest
from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.names import digest_name
from specdec_core.config import PairSpec
from specdec_core.models.location import located
from specdec_core.models.reading import CONFIG, read_config, reading

# In the order in which transformers looks for them.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# What loading and saving a model changes in its configuration without changing the model.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


TARGET = "target"  # its key; no draft may have this name


def fingerprints(spec: PairSpec) -> dict[str, str]:
    """The fingerprint of each model of a pair: `target`'s and each draft's by its name."""
    models = {TARGET: spec.target, **spec.drafts}
    return {name: fingerprint(model) for name, model in models.items()}


def served_fingerprints(spec: PairSpec, served: str) -> dict[str, str]:
    """The fingerprints of a pair's models, where a server runs the target. If the target's weights
    are not on this machine, the name of the `served` model stands for them. Raises
    :class:`UserError` for a draft's missing weights."""
    drafts = {name: fingerprint(model) for name, model in spec.drafts.items()}
    try:
        target = fingerprint(spec.target)
    except UserError:
        target = digest_name(served)
    return {TARGET: target, **drafts}


def fingerprint(model_name: str) -> str:
    """16 hex digits that identify the weights of a model, by a name that :func:`located` takes.

    SHA-256 over the configuration and, of every weight file, the size and the contents; where the
    files are larger than 256 MiB together, the safetensors header and 64 blocks of 4 KiB spread
    evenly over each file. So training, noise, quantisation or another architecture change it
    whatever the size, but an edit of a large model outside the sampled blocks does not. The
    folder's place, the tokenizer and the data type that the model is loaded in do not change it.
    The same tensors in different files (sharded differently) give a different fingerprint. Raises
    :class:`UserError` where the weights or the configuration are not on this machine.
    """
    folder = model_folder(model_name)
    config = read_config(folder, model_name).items()
    kept = {key: value for key, value in config if key not in _VOLATILE}
    described = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    files = weight_files(model_name, folder)
    try:
        return files_digest(files, described)
    except OSError as error:
        raise UserError(f"{model_name}: {error.filename}: {os_reason(error)}") from None


def model_folder(model_name: str) -> Path:
    """Where a model is on this machine. Raises :class:`UserError` where it is not."""
    path = Path(located(model_name))
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_name, local_files_only=True))
    except (OSError, ValueError):
        raise UserError(
            f"{model_name}: no such folder, and no model of that name in the hub's cache"
        ) from None


def fetch_weights(model_name: str) -> None:
    """Download the weights and the configuration of a model on the hub, unless they are on this
    machine; nothing is loaded. Raises :class:`UserError` where they cannot be downloaded."""
    with suppress(UserError):
        if all(file.exists() for file in weight_files(model_name, model_folder(model_name))):
            return
    path = located(model_name)
    if Path(path).is_dir():  # its fingerprint says what is missing
        return
    from huggingface_hub import list_repo_files, snapshot_download

    with reading(model_name, "be had from the hub"):
        there = list_repo_files(path)
        first = [name for name in _WEIGHTS if name in there][:1]
        folder = Path(snapshot_download(path, allow_patterns=[CONFIG, *first]))
        files = weight_files(model_name, folder)
        snapshot_download(path, allow_patterns=[str(file.relative_to(folder)) for file in files])


def weight_files(model_name: str, folder: Path) -> list[Path]:
    """The files that the model is loaded from, sorted by name."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            break
    else:
        raise UserError(
            f"{model_name}: no weights in {folder} (model.safetensors or {_WEIGHTS[2]})"
        )
    if not name.endswith(".index.json"):
        return [folder / name]
    try:
        shards = json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / shard for shard in sorted(set(shards))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{model_name}: {name} is not an index of weight files") from None
