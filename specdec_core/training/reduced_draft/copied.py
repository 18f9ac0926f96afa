"""A draft that begins as some of its target's decoder layers, between the target's own embedding
and the rows of its output layer that are of the draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.models.reduced_draft import ReducedDraft, ReducedDraftConfig
from specdec_core.models.reduced_draft.target_tables import target_layers
from specdec_core.training.reduced_draft.settings import DraftTrainingSettings

# What is no value of a Llama's configuration, or another one's in a draft.
_OTHER = ("model_type", "architectures", "dtype", "layer_types", "quantization_config", "reduced")


def copied_draft(
    name: str,
    target: PretrainedConfig,
    tables: Mapping[str, Tensor],
    proposable: Tensor,
    settings: DraftTrainingSettings,
) -> ReducedDraft:
    """A draft of the target of that name, with that configuration and these tables (see
    `read_tables`), which proposes these tokens and begins as the `copied_layers`. What is the
    target's own is not trained.

    Raises:
        UserError: the target is no Llama, has no such layers, or they cannot be read.
    """
    config = _config(name, target, settings)
    layers = target_layers(name, settings.copied_layers)
    draft = ReducedDraft(config)
    draft.lm_head.tokens = proposable
    with torch.no_grad():
        for own, copied in zip(draft.model.layers, layers, strict=True):
            own.load_state_dict(copied)
        draft.model.norm.weight.copy_(tables["norm"])
        draft.model.embed_tokens.weight = _frozen(tables["embed_tokens"])
        draft.lm_head.linear.weight = _frozen(tables["output"][proposable])
    return draft


def _frozen(table: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(table.float(), requires_grad=False)


def _config(
    name: str, target: PretrainedConfig, settings: DraftTrainingSettings
) -> ReducedDraftConfig:
    text = target.get_text_config(decoder=True)
    if not _is_llama(text):
        raise UserError(
            f"{name}: a {text.model_type}; a draft can begin as layers of Llama-like targets only"
            " (llama, and mistral without a window)"
        )
    count = text.num_hidden_layers
    if wrong := [number for number in settings.copied_layers if not 0 <= number < count]:
        raise UserError(f"{name}: has no decoder layer {wrong[0]}; it has 0 to {count - 1}")
    values = {key: value for key, value in text.to_dict().items() if key not in _OTHER}
    return ReducedDraftConfig(
        **values
        | {
            "num_hidden_layers": len(settings.copied_layers),
            "tie_word_embeddings": False,
            "reduced": {"draft_vocab_size": min(settings.draft_vocab_size, text.vocab_size)},
        }
    )


def _is_llama(config: PretrainedConfig) -> bool:
    """Whether its layers compute what a Llama's with the same configuration do."""
    windowless = getattr(config, "sliding_window", None) is None
    return config.model_type == "llama" or (config.model_type == "mistral" and windowless)
