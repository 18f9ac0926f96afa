"""The models that the slot cache can serve exactly."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_core.base.errors import UserError

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_EARLY, _PROBES = 2, 3  # tokens before those that differ, and pairs of rows, of a probe
_TAKEN = ("past_key_values", "position_ids")  # by every forward of ours


def check_supported(config: PreTrainedConfig, name: str) -> None:
    """Raises :class:`UserError` for a model that the slot cache cannot serve exactly."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name}: an encoder-decoder model; only decoder-only models are supported")
    if config.model_type in {"bloom", "mpt"} or getattr(config, "alibi", False):
        raise UserError(
            f"{name}: {config.model_type} uses ALiBi positions, which are not supported"
        )
    if "local" in getattr(config, "attention_layers", ()):
        raise UserError(
            f"{name}: {config.model_type} has local attention layers, which take a token's place in"
            " the cache for its position; only full and sliding attention are supported"
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
    # A forward may ignore arguments that it does not know.
    taken = _TAKEN if model is None else inspect.signature(model.forward).parameters
    if lacking := [argument for argument in _TAKEN if argument not in taken]:
        raise UserError(
            f"{name}: {config.model_type} takes no {' and no '.join(lacking)}; only models that"
            " keep keys and values of tokens at given positions are supported"
        )


def check_positions(config: PreTrainedConfig, name: str, max_length: int) -> None:
    """Raises :class:`UserError` for a target with positions that change in sequences of
    `max_length` tokens."""
    short = _short_positions(config.get_text_config(decoder=True))
    if short and max_length > short:
        raise UserError(
            f"{name}: past {short} tokens longrope changes the positions of the whole text and of"
            f" those beside it; --max-length (runner.max_length) is {max_length}, and may be"
            f" {short} at most"
        )


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Raises :class:`UserError` for a model in which later tokens change the logits of earlier
    ones. It is run once, over a few tokens."""
    text = model.config.get_text_config(decoder=True)
    width = min(2 * _EARLY, context_length(text) or 2 * _EARLY)
    numbers = torch.Generator().manual_seed(0)
    # Special tokens are often the first or the last ones.
    shape = (2 * _PROBES, width)
    tokens = torch.randint(text.vocab_size // 4, text.vocab_size // 2 + 1, shape, generator=numbers)
    tokens[_PROBES:, :_EARLY] = tokens[:_PROBES, :_EARLY]
    with torch.no_grad():
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits[:, :_EARLY]
    ones, others = logits.float().chunk(2)
    # Rounding may differ with the place in a batch, and with it the choice between two equally good
    # experts, but not in every pair of rows.
    rounding = max(1e-4, 2 * torch.finfo(logits.dtype).eps)
    changes = (ones - others).abs().amax(dim=(1, 2)) / ones.std(dim=(1, 2))
    if bool((changes > rounding).all()):
        raise UserError(
            f"{name}: {text.model_type} is not causal: later tokens change the logits of earlier"
            " ones; only decoder-only models are supported (some models have is_decoder: true in"
            " config.json where they are trained as one)"
        )


def context_length(config: PreTrainedConfig) -> int | None:
    """The number of positions that the model distinguishes in any forward, where its configuration
    has it."""
    config = config.get_text_config(decoder=True)
    limits = getattr(config, "max_position_embeddings", None), _short_positions(config)
    return min((limit for limit in limits if limit), default=None)


def _short_positions(config: PreTrainedConfig) -> int | None:
    """The number of positions of longrope's short frequencies, in a model with longrope. A forward
    with a later position takes the long frequencies for all its tokens, in all rows."""
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    each = [ropes] if "rope_type" in ropes else ropes.values()  # or one for each kind of layer
    long = [rope for rope in each if rope and rope["rope_type"] == "longrope"]
    return min((rope["original_max_position_embeddings"] for rope in long), default=None)
