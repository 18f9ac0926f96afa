"""Heads of SpecForge, which SGLang serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_core.config import parse
from specdec_core.models.eagle.formats.llama import shape_values
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.settings import EagleSettings, default_layers

_ARCHITECTURE = "LlamaForCausalLMEagle3"
# Modules of SpecForge and of EAGLE's authors have no biases, whatever the keys say.
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def recognises(config: dict[str, Any], folder: Path) -> bool:
    """By its architecture."""
    return _ARCHITECTURE in (config.get("architectures") or ())


def build(config: dict[str, Any], layers: int, name: str) -> EagleHead:
    """The head of that shape, without its weights."""
    shape = shape_values({**config, **NO_BIAS}, config, name)
    values = {**shape, "feature_layers": _feature_layers(config, layers)}
    return EagleHead(parse(EagleSettings, values, name))


def renamed(tensor: str) -> str:
    """The head's name of a tensor of the file: its decoder layer is `midlayer`."""
    return tensor.replace("midlayer.", "layers.0.", 1)


def written(tensor: str) -> str:
    """The file's name of a tensor of the head."""
    return tensor.replace("layers.0.", "midlayer.", 1)


def lacks(settings: EagleSettings, layers: int) -> str | None:
    """The part of a head, for a target with `layers` layers, that the format cannot store; None
    where it can store all of it."""
    if settings.norm_before_residual or settings.norm_before_fc:
        return "its norms are elsewhere"
    if settings.attention_bias or settings.mlp_bias:
        return "its layer has biases"
    if not {0, layers}.isdisjoint(settings.feature_layers):
        return "it reads what the target's first layer does, or its output layer"
    return None


def described(settings: EagleSettings, dtype: str) -> dict[str, Any]:
    """The `config.json` of a head that the format can store."""
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
    """SpecForge's `eagle_config` has numbers of layers by their *outputs*; its default is the same
    as this project's, by inputs. A list at the top level is vLLM's, by inputs."""
    outputs = (config.get("eagle_config") or {}).get(_LAYERS)
    if outputs:
        return tuple(layer + 1 for layer in outputs)
    return tuple(config.get(_LAYERS) or default_layers(layers))
