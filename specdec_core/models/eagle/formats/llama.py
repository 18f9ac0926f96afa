"""What all formats have in common: a Llama configuration describes the decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec_core.base.errors import UserError
from specdec_core.models.eagle.settings import LayerSettings


def shape_values(layer: Mapping[str, Any], config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The sizes of a head with this `config`: the values of :class:`LayerSettings` in the Llama
    configuration `layer`, with transformers' defaults for keys that it lacks, and what the head
    reads and proposes. Raises :class:`UserError` where it is no Llama layer, more than one,
    quantised, or not a configuration."""
    check_plain(layer, name)
    kind = layer.get("model_type", "llama")
    if kind != "llama":
        raise UserError(f"{name}: its decoder layer is of the kind {kind!r}; only llama's is read")
    try:
        llama = LlamaConfig.from_dict(dict(layer))
        rope = dict(llama.rope_parameters or {})
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: not a decoder layer's configuration: {reason}") from None
    if llama.num_hidden_layers != 1:
        raise UserError(
            f"{name}: has {llama.num_hidden_layers} decoder layers; only heads with one are read"
        )
    rope_type = rope.get("rope_type", "default")
    if rope_type not in {"default", *ROPE_INIT_FUNCTIONS}:
        raise UserError(f"{name}: unknown rope_type {rope_type!r}")
    shape = {key: getattr(llama, key) for key in LayerSettings.model_fields}
    return {
        **shape,
        "rope_parameters": rope,
        "draft_vocab_size": config.get("draft_vocab_size") or shape["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size") or shape["hidden_size"],
    }


def check_plain(config: Mapping[str, Any], name: str) -> None:
    """Raises :class:`UserError` for quantised heads."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise UserError(f"{name}: is quantised ({key}); only unquantised heads are read")
