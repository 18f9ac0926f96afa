"""Load EAGLE heads of any known format, and save them for vLLM or SGLang."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_folder
from specdec_core.models import int8
from specdec_core.models.draft_vocabulary import draft_vocabulary
from specdec_core.models.eagle.formats import original, specforge, speculators
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.head import AnyHead, EagleHead, EagleOneHead
from specdec_core.models.eagle.settings import EagleSettings, check_target
from specdec_core.models.location import located
from specdec_core.models.reading import CONFIG, read_config, reading
from specdec_core.models.weight_files import WEIGHTS, check_tensors, read_tensors

_FORMATS = (speculators, specforge, original)
# Unsupported methods of drafting: by words in *speculators*' kind or in the names of architectures,
# and by keys that only they have. With a draft vocabulary it is an EAGLE head.
_METHODS = {"peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark", "medusa": "Medusa"}
_KEYS = {"dflash_config": "DFlash", "fc_norm": "EAGLE-3.1", "norm_output": "EAGLE-3.1"}
_KEYS_OF_HEADS = {"pard_token": "P-EAGLE", "ptd_token_id": "P-EAGLE"}
_EMBEDDING = "embed_tokens.weight"
_BUFFERS = ("d2t", "t2d")
_FILES = ("*.json", "*.safetensors", "*.bin")


def is_head(folder: Path) -> bool:
    """Whether a folder holds an EAGLE head that :func:`load_head` knows, by its `config.json`, and
    where that leaves it open, by the names of its tensors."""
    try:
        config = read_config(folder, str(folder))
    except UserError:
        return False
    return any(form.recognises(config, folder) for form in _FORMATS)


def names_head(name: str) -> bool:
    """Whether a model's name, as :func:`located` takes it, is that of a head. False for one that
    cannot be found, which loading it reports. Of a model on the hub only `config.json` is fetched,
    and its weights where these have to tell, as of a model with a single layer."""
    path = located(name)
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith((".", os.sep)):
            return False  # a path on this machine: the hub is not asked for it
        from transformers.utils import cached_file

        try:
            folder = Path(str(cached_file(path, CONFIG))).parent
            if read_config(folder, name).get("num_hidden_layers") == 1:
                folder = head_folder(name)
        except (OSError, ValueError, UserError):
            return False
    return is_head(folder)


def _check_method(name: str, config: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` for the `config.json` of a draft of an unsupported method."""
    kind = str(config.get("speculators_model_type") or "eagle3")
    called = " ".join([kind, *map(str, config.get("architectures") or ())]).lower()
    methods = [method for word, method in _METHODS.items() if word in called]
    keys = _KEYS | (_KEYS_OF_HEADS if config.get("draft_vocab_size") else {})
    methods += [method for key, method in keys.items() if config.get(key)]
    if kind != "eagle3":
        methods.append(f"the kind {kind!r}")
    if methods:
        raise UserError(
            f"{name}: a draft of {methods[0]}, which is not supported; drafts are language models,"
            " and EAGLE heads in the authors', SpecForge's or speculators' eagle3 format"
        )


def check_method(name: str) -> None:
    """Raises :class:`UserError` for a folder on this machine, by a name that :func:`located` takes,
    that holds a draft of an unsupported method."""
    folder = Path(located(name))
    if (folder / CONFIG).is_file():
        _check_method(name, read_config(folder, name))


def head_folder(name: str) -> Path:
    """The folder of a head or model, by a name that :func:`located` takes; one on the hub is
    downloaded where the hub's cache lacks it. Raises :class:`UserError` where there is no such
    folder, or it cannot be downloaded."""
    path = located(name)
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", os.sep)):
        raise UserError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download

    with reading(name, "be had from the hub"):
        return Path(snapshot_download(path, allow_patterns=list(_FILES)))


def head_positions(name: str) -> int:
    """The positions of a head's layer, as its `config.json` or else transformers has them. Raises
    :class:`UserError` where there is no such file."""
    config = read_config(head_folder(name), name)
    layer = config.get("transformer_layer_config", config)
    default = LlamaConfig.max_position_embeddings
    positions = layer.get("max_position_embeddings", default) if isinstance(layer, dict) else 0
    return positions if isinstance(positions, int) else default  # its loading says what is wrong


def read_card(name: str) -> EagleCard:
    """What a head's folder says of it besides its shape; little for a head of another project.
    Raises :class:`UserError` where there is no such folder or `config.json`, or the card is
    damaged."""
    return speculators.read_card(read_config(head_folder(name), name), name)


def load_head(
    name: str,
    target_config: PretrainedConfig,
    target_fingerprint: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> AnyHead:
    """A head by a name that :func:`located` takes, for the target with that configuration, on the
    CPU and in evaluation mode. An `embed_tokens` or `lm_head` that the head shares with its target
    is None.

    Args:
        name: a folder or hub id.
        target_config: the target's.
        target_fingerprint: of its weights, for which this project's heads are trained; None: any.
        dtype: of the weights; rotary frequencies stay in float32.

    Raises:
        UserError: there is no such head, it is damaged or of a kind that is not read, or it is for
            another target.
    """
    form, config, head = _described(name, target_config)
    trained_for = speculators.read_card(config, name).target_fingerprint
    if target_fingerprint and trained_for and trained_for != target_fingerprint:
        raise UserError(
            f"{name}: was trained for another target (weights {trained_for}, this target's are"
            f" {target_fingerprint})"
        )
    layers = target_config.get_text_config(decoder=True).num_hidden_layers
    # This project's heads read the state after the last layer after the target's norm, EAGLE-3
    # heads of other projects before it.
    normed = speculators.form_of(config) is not None or isinstance(head, EagleOneHead)
    check_target(head.settings, target_config, layers if normed else layers - 1, name)
    stored = read_tensors(head_folder(name), name)
    tensors = {form.renamed(key): tensor for key, tensor in stored.items()}
    if speculators.form_of(config) == "int8":
        tensors = int8.unpacked(tensors, name)
    _fill(head, tensors, dtype, name)
    return head.eval()


def _fill(head: AnyHead, tensors: dict[str, Tensor], dtype: torch.dtype, name: str) -> None:
    """Give a head without weights the tensors of a file, in `dtype` where they are floats. Raises
    :class:`UserError` where tensors are missing, unknown, of other shapes or quantised."""
    tensors = {key: value for key, value in tensors.items() if not key.endswith("inv_freq")}
    embedding = tensors.pop(_EMBEDDING, None)
    if isinstance(head, EagleHead):
        if "lm_head.weight" not in tensors:
            raise UserError(f"{name}: no output layer (lm_head.weight)")
        sizes = head.settings.draft_vocab_size, head.settings.vocab_size
        tensors |= draft_vocabulary(tensors, *sizes, name)
    expected = {key: tuple(tensor.shape) for key, tensor in head.state_dict().items()}
    settings = head.settings
    if embedding is not None:
        tensors[_EMBEDDING] = embedding
        expected[_EMBEDDING] = (settings.vocab_size, settings.hidden_size)
    elif settings.hidden_size != settings.target_hidden_size:
        raise UserError(
            f"{name}: no embed_tokens, but the target's embedding is {settings.target_hidden_size}"
            f" wide and the head {settings.hidden_size}"
        )
    check_tensors(tensors, expected, name)
    tensors = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }
    if embedding is not None:
        head.embed_tokens = nn.Embedding.from_pretrained(tensors[_EMBEDDING], freeze=True)
    head.load_state_dict(tensors, assign=True)


def save_head(
    head: EagleHead,
    folder: Path,
    card: EagleCard,
    *,
    form: Literal["speculators", "int8", "specforge"] = "speculators",
    dtype: torch.dtype = torch.bfloat16,
    embedding: bool = False,
) -> None:
    """Write a head into `folder`, as a whole; what was there is replaced.

    Args:
        head: on any device.
        folder: where to.
        card: the target that it is for, and how it was trained.
        form: `speculators` for the format that vLLM reads; `int8` for about half of its size, which
            only :func:`load_head` reads; `specforge` for the one that SGLang reads, if it has a
            place for all of the head (:func:`specforge.lacks`), without the card. For vLLM, no
            feature should be the output layer's: it takes that number for the state before the
            target's norm.
        dtype: of weights and, with `int8`, of what is no matrix.
        embedding: whether `embed_tokens` is the head's own. It always is where the head is not as
            wide as the target.

    Raises:
        UserError: the head's draft vocabulary is none of the target's.
        NoRoom: the disk is full.
    """
    settings = head.settings
    tensors = dict(head.state_dict())
    buffers = {key: tensors[key].cpu() for key in _BUFFERS}
    draft_vocabulary(buffers, settings.draft_vocab_size, settings.vocab_size, "the head")
    if not embedding and settings.hidden_size == settings.target_hidden_size:
        tensors.pop(_EMBEDDING, None)
    if settings.draft_vocab_size == settings.vocab_size:  # vLLM has no place for offsets of zero
        tensors = {key: tensor for key, tensor in tensors.items() if key not in _BUFFERS}
    if form == "int8":
        tensors = int8.packed(tensors)
    tensors = {key: _written(key, tensor, dtype) for key, tensor in tensors.items()}
    named = str(dtype).removeprefix("torch.")
    if form == "specforge":
        tensors = {specforge.written(key): tensor for key, tensor in tensors.items()}
        config = specforge.described(settings, named)
    else:
        config = speculators.described(settings, card, form, named)
    with atomic_folder(folder) as new:
        # Files of safetensors' save_file cannot be read by other users.
        (new / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _written(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    as_is = not tensor.is_floating_point() or int8.is_scale(key)
    return tensor.to("cpu", tensor.dtype if as_is else dtype).contiguous()


def head_settings(name: str, target_config: PretrainedConfig) -> EagleSettings:
    """A head's shape, from configurations alone. Raises :class:`UserError` where there is no such
    head."""
    return _described(name, target_config)[-1].settings


def _described(name: str, target_config: PretrainedConfig) -> tuple[Any, dict[str, Any], AnyHead]:
    """A head's format, its `config.json`, and the head without its weights."""
    folder = head_folder(name)
    config = read_config(folder, name)
    _check_method(name, config)
    form = next((form for form in _FORMATS if form.recognises(config, folder)), None)
    if form is None:
        raise UserError(
            f"{name}: not an EAGLE head of a known format (speculators' eagle3, SpecForge's or"
            " SafeAILab's)"
        )
    layers = target_config.get_text_config(decoder=True).num_hidden_layers
    return form, config, _unfilled(form, config, layers, name)


def _unfilled(form: Any, config: dict[str, Any], layers: int, name: str) -> AnyHead:
    """A head on the device `meta`, without memory for its weights."""
    try:
        with torch.device("meta"):
            head: AnyHead = form.build(config, layers, name)
    except (KeyError, TypeError, AttributeError) as error:  # an unknown activation for instance
        raise UserError(f"{name}: not a head's configuration: {error}") from None
    head.rotary = LlamaRotaryEmbedding(head.config)  # no file has its frequencies
    return head
