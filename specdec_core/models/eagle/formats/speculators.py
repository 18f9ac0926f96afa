"""Heads in the format of *speculators*, which vLLM serves and this project writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.config import Value, parse
from specdec_core.models.eagle.formats.llama import check_plain, shape_values
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.settings import EagleSettings, default_layers

_KIND = "speculators_model_type"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OF_THE_HEAD = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
)
_OURS = "specdec"  # a key that vLLM does not look at, and *speculators* keeps


class EagleCard(Value):
    """What a head's folder says of it besides its shape."""

    target: str = Field(description="hub id or folder of the target, which vLLM loads with it")
    target_architectures: tuple[str, ...] = ()
    target_fingerprint: str | None = None
    speculative_tokens: int = Field(default=5, ge=1, description="that vLLM drafts by default")
    training: dict[str, Any] = Field(default={}, description="what the head was trained on, how")


def recognises(config: dict[str, Any], folder: Path) -> bool:
    """By the kind of speculator."""
    return config.get(_KIND) == "eagle3"


def build(config: dict[str, Any], layers: int, name: str) -> EagleHead:
    """The head of that shape, without its weights."""
    check_plain(config, name)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{name}: no transformer_layer_config")
    # Without the key, *speculators* takes False, and vLLM True.
    if "norm_before_residual" not in config:
        raise UserError(f"{name}: norm_before_residual is missing; true or false")
    values = {
        **shape_values(layer, config, name),
        "feature_layers": config.get(_LAYERS) or default_layers(layers),
        "norm_before_residual": config["norm_before_residual"],
        "norm_before_fc": config.get("norm_before_fc", False),
    }
    return EagleHead(parse(EagleSettings, values, name))


def renamed(tensor: str) -> str:
    """The head uses the names of the format."""
    return tensor


def described(settings: EagleSettings, card: EagleCard, form: str, dtype: str) -> dict[str, Any]:
    """The `config.json` of a head, with every key for which *speculators* and vLLM have different
    defaults."""
    shape = settings.model_dump(mode="json")
    own = {key: shape.pop(key) for key in _OF_THE_HEAD}
    layers = shape.pop("feature_layers")
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **shape,
        # vLLM looks for the number of features nowhere else, and expects three.
        "num_aux_hidden_states": len(layers),
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": card.speculative_tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        _KIND: "eagle3",
        **own,
        _LAYERS: layers,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": card.target,
                "architectures": list(card.target_architectures),
            },
        },
        _OURS: {
            "form": form,
            "target_fingerprint": card.target_fingerprint,
            "training": card.training,
        },
    }


def form_of(config: dict[str, Any]) -> str | None:
    """The form in which this project has stored a head; None for a head of another project."""
    form: str | None = _mapping(config.get(_OURS)).get("form")
    return form


def read_card(config: dict[str, Any], name: str) -> EagleCard:
    """The card of a head in this format. Raises :class:`UserError` where it is damaged."""
    method = _mapping(config.get("speculators_config"))
    verifier = _mapping(method.get("verifier"))
    proposal = _mapping(next(iter(method.get("proposal_methods") or ()), None))
    values = {
        "target": verifier.get("name_or_path") or "",
        "target_architectures": verifier.get("architectures") or (),
        "speculative_tokens": proposal.get("speculative_tokens"),
        **{key: value for key, value in _mapping(config.get(_OURS)).items() if key != "form"},
    }
    values = {key: value for key, value in values.items() if value is not None}
    return parse(EagleCard, values, name)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
