"""The shape of an EAGLE head, and what it and its target must agree in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pydantic import Field
from transformers import LlamaConfig, PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.config import Value


class LayerSettings(Value):
    """A head's decoder layer, as in a Llama's configuration."""

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = Field(default={"rope_type": "default", "rope_theta": 10000.0})
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = Field(ge=2)
    vocab_size: int = Field(ge=2, description="the target's")


class EagleSettings(LayerSettings):
    """An EAGLE-3 head for a target with hidden states of `target_hidden_size`.

    The head reads the *inputs* of the target's layers `feature_layers`, increasing; the number of
    layers itself stands for the input of the output layer. It can propose `draft_vocab_size`
    tokens.
    """

    draft_vocab_size: int = Field(ge=2)
    target_hidden_size: int = Field(ge=1)
    feature_layers: tuple[int, ...] = Field(min_length=1)
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    @classmethod
    def for_target(
        cls, config: PretrainedConfig, draft_vocab_size: int, **changes: Any
    ) -> EagleSettings:
        """A head as wide as the target of that configuration, with one of its layers' shape."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        theta = getattr(text, "rope_theta", None)
        rope = getattr(text, "rope_parameters", None) or {}
        if "rope_theta" in rope:
            theta = rope["rope_theta"]
        values: dict[str, Any] = {
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": float(theta or 10000.0)},
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 1 << 20,
            "vocab_size": text.vocab_size,
            "draft_vocab_size": min(draft_vocab_size, text.vocab_size),
            "target_hidden_size": text.hidden_size,
            "feature_layers": default_layers(text.num_hidden_layers),
        }
        return cls(**{**values, **changes})

    def layer_config(self) -> LlamaConfig:
        """The configuration of its decoder layer."""
        values = self.model_dump(include=set(LayerSettings.model_fields))
        return LlamaConfig(num_hidden_layers=1, **values)


def default_layers(layers: int) -> tuple[int, ...]:
    """Three layers of a target with L `layers`, low, middle and high: 2, L/2 and L - 3, or the
    nearest distinct ones."""
    wanted = [2, layers // 2, layers - 3]
    chosen: list[int] = []
    for index, layer in enumerate(wanted):
        least = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(layer, least), layers - (len(wanted) - 1 - index)))
    return tuple(dict.fromkeys(max(layer, 0) for layer in chosen))


def check_target(settings: EagleSettings, target: PretrainedConfig, last: int, name: str) -> None:
    """Raises :class:`UserError` for a head of a target of another shape. `last` is the highest
    layer that the head may read."""
    text = target.get_text_config(decoder=True)
    for what, of_head, of_target in (
        ("hidden states of width", settings.target_hidden_size, text.hidden_size),
        ("a vocabulary of", settings.vocab_size, text.vocab_size),
    ):
        if of_head != of_target:
            raise UserError(f"{name}: is for a target with {what} {of_head}, not {of_target}")
    layers = settings.feature_layers
    check_layers(layers, last, f"{name}: reads the layers {list(layers)}")


def check_layers(layers: Sequence[int], last: int, what: str) -> None:
    """Raises :class:`UserError`, which begins with `what`, unless the layers that a head reads are
    increasing numbers from 0 to `last`."""
    increasing = all(a < b for a, b in pairwise(layers))
    if not increasing or layers[0] < 0 or layers[-1] > last:
        raise UserError(f"{what}: expected increasing numbers from 0 to {last}")
