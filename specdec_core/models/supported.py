"""The models that the slot cache can serve exactly."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_core.base.errors import UserError

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def check_supported(config: PreTrainedConfig, name: str) -> None:
    """Raises :class:`UserError` for a model that the slot cache cannot serve exactly."""
    config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name}: an encoder-decoder model; only decoder-only models are supported")
    if config.model_type in {"bloom", "mpt"} or getattr(config, "alibi", False):
        raise UserError(
            f"{name}: {config.model_type} uses ALiBi positions, which are not supported"
        )
    try:
        kinds = set(get_layer_types_and_kwargs(config)[0])
    except AttributeError:
        raise UserError(f"{name}: {config.model_type} is not a decoder-only model") from None
    if unsupported := sorted(kinds - _SUPPORTED_LAYERS):
        raise UserError(
            f"{name}: {config.model_type} has layers of kind {', '.join(unsupported)};"
            " only full and sliding attention are supported"
        )


def context_length(config: PreTrainedConfig) -> int | None:
    """The number of positions that the model distinguishes, where its configuration has it."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
