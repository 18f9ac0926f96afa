"""The initial weights of a head: weights of its target, or of a trained head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.eagle.loading import load_head
from specdec_core.training.recorded.features import FeaturesCard


def start_head(
    settings: EagleSettings, tables: Mapping[str, Tensor], proposable: Tensor, seed: int
) -> EagleHead:
    """A head for the target with these tables (see `read_tables`), which proposes these tokens.

    g starts as the highest of the features, which is nearly what the head's own state has to be:
    what the output layer reads. The layer starts as the target's last one over that state, to which
    the embedding is new. The target's embedding, final norm and output layer are the head's.
    """
    torch.manual_seed(seed)
    head = EagleHead(settings)
    head.propose_only(proposable)
    head.embed_tokens = _frozen(tables)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2 and parameter.requires_grad:
                parameter.normal_(std=0.02)
        highest = head.fc.weight[:, -settings.target_hidden_size :]
        head.fc.weight.zero_()
        highest.copy_(torch.eye(*highest.shape))
        head.lm_head.weight.copy_(tables["output"][proposable])
        for name, own in [("norm", head.norm.weight), *_layer_weights(head)]:
            given = tables.get(name)
            if given is not None and given.shape == own.shape:
                own.copy_(given)
    return head


def trained_head(name: str, target: PretrainedConfig, weights: str) -> EagleHead:
    """The head of that name, to be trained further, for a target with this configuration and the
    fingerprint of its weights. Raises :class:`UserError` where there is no such head."""
    head = load_head(name, target, weights)
    if not isinstance(head, EagleHead):
        raise UserError(f"{name}: an EAGLE-1 head; heads of EAGLE-3 can be trained further")
    return head


def continued_head(
    name: str, target: PretrainedConfig, features: FeaturesCard, tables: Mapping[str, Tensor]
) -> EagleHead:
    """The trained head of that name, for the target with this configuration, these features and
    these tables. Raises :class:`UserError` as :func:`trained_head`, or where it reads other layers.
    """
    head = trained_head(name, target, features.fingerprint)
    if (read := head.settings.feature_layers) != features.layers:
        raise UserError(
            f"{name}: reads the layers {list(read)}, the features are of {list(features.layers)}"
        )
    if head.embed_tokens is None:
        head.embed_tokens = _frozen(tables)
    return head


def _frozen(tables: Mapping[str, Tensor]) -> nn.Embedding:
    table = nn.Embedding.from_pretrained(tables["embed_tokens"].float(), freeze=True)
    assert isinstance(table, nn.Embedding)
    return table


def _layer_weights(head: EagleHead) -> Iterator[tuple[str, Tensor]]:
    """The layer's weights, by the names that a target's last layer has for them; of what reads the
    embedding beside the state, the part that reads the state."""
    for name, weight in head.layers[0].named_parameters():
        if name in (
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
        ):
            yield f"layer.{name}", weight[:, weight.shape[1] // 2 :]
        elif name == "hidden_norm.weight":
            yield "layer.input_layernorm.weight", weight
        elif name != "input_layernorm.weight":  # of the embedding
            yield f"layer.{name}", weight
