"""Heads of SpecForge, which SGLang serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_core.config import parse
from specdec_core.models.eagle.formats.llama import layer_values
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.settings import EagleSettings, default_layers

_ARCHITECTURE = "LlamaForCausalLMEagle3"
# Its modules, and those of EAGLE's authors, have none, whatever keys are left of a target's.
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def recognises(config: dict[str, Any], folder: Path) -> bool:
    """By its architecture."""
    return _ARCHITECTURE in (config.get("architectures") or ())


def build(config: dict[str, Any], layers: int, name: str) -> EagleHead:
    """The head of that shape, without its weights."""
    shape = layer_values({**config, **NO_BIAS}, name)
    values = {
        **shape,
        "draft_vocab_size": config.get("draft_vocab_size") or shape["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size") or shape["hidden_size"],
        "feature_layers": _feature_layers(config, layers),
    }
    return EagleHead(parse(EagleSettings, values, name))


def renamed(tensor: str) -> str:
    """The decoder layer is called `midlayer` there."""
    return tensor.replace("midlayer.", "layers.0.", 1)


def written(tensor: str) -> str:
    """The other way round."""
    return tensor.replace("layers.0.", "midlayer.", 1)


def lacks(settings: EagleSettings, layers: int) -> str | None:
    """What of a head, for a target with so many layers, the format has no place for; None where it
    has one for all of it."""
    if settings.norm_before_residual or settings.norm_before_fc:
        return "its norms are elsewhere"
    if settings.attention_bias or settings.mlp_bias:
        return "its layer has biases"
    if not {0, layers}.isdisjoint(settings.feature_layers):
        return "it reads what the target's first layer does, or its output layer"
    return None


def described(settings: EagleSettings, dtype: str) -> dict[str, Any]:
    """The `config.json` of a head that lacks nothing."""
    shape = settings.model_dump(mode="json", exclude={"norm_before_residual", "norm_before_fc"})
    outputs = [layer - 1 for layer in shape.pop("feature_layers")]
    rope = shape["rope_parameters"]
    scaled = {} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **shape,
        # transformers before version 5 has these for `rope_parameters`.
        "rope_theta": rope["rope_theta"],
        **scaled,
        "eagle_config": {"use_aux_hidden_state": True, _LAYERS: outputs},
    }


def _feature_layers(config: dict[str, Any], layers: int) -> tuple[Any, ...]:
    """SpecForge numbers the layers whose *outputs* the head reads, in `eagle_config`; without that,
    its default comes to ours, of inputs. A list at the top is of vLLM, and of inputs."""
    outputs = (config.get("eagle_config") or {}).get(_LAYERS)
    if outputs:
        return tuple(layer + 1 for layer in outputs)
    return tuple(config.get(_LAYERS) or default_layers(layers))
