"""The weights that a draft starts with.

A draft is some of its target's decoder layers between the target's own embedding and output layer,
or random layers of any shape between approximations of the two; or it has been trained before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.models.eagle.loading import names_head
from specdec_core.models.loading import load_config
from specdec_core.models.reduced_draft.model import ReducedDraft, ReducedDraftConfig
from specdec_core.models.reduced_draft.storing import load_reduced, stored_projection
from specdec_core.models.reduced_draft.target_tables import target_layers
from specdec_core.training.reduced_draft.settings import DraftTrainingSettings

_SMALL = 0.1


class ProjectedEmbedding(nn.Module):
    """The target's embedding, which is not trained, and its projection to the draft's width."""

    table: Tensor  # (vocabulary, target width)

    def __init__(self, table: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.projection = nn.Linear(table.shape[1], width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(…, width) of (…)."""
        embedded = nn.functional.embedding(tokens, self.table)
        projected: Tensor = self.projection(embedded.to(self.projection.weight.dtype))
        return projected


def draft_config(
    target: PretrainedConfig, settings: DraftTrainingSettings, proposed: int
) -> ReducedDraftConfig:
    """The configuration of a draft that can propose `proposed` tokens, with the target's vocabulary
    and context."""
    text = target.get_text_config(decoder=True)
    shape = settings.shape
    return ReducedDraftConfig(
        vocab_size=text.vocab_size,
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["key_value_heads"],
        max_position_embeddings=getattr(text, "max_position_embeddings", None)
        or LlamaConfig.max_position_embeddings,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        reduced={"draft_vocab_size": proposed},
    )


def start_draft(
    target: PretrainedConfig,
    tables: Mapping[str, Tensor],
    proposable: Tensor,
    settings: DraftTrainingSettings,
) -> ReducedDraft:
    """A draft of the target with that configuration and these tables (see `read_tables`), which
    proposes these tokens.

    With E the target's embedding and V the first right singular vectors of it, the draft embeds a
    token as E V; E V Vᵀ is the best approximation of E of that rank. Its output layer
    starts as W V' alike, W being the target's for normed states: the norm's own scale is a factor
    of it. What the layers add to the stream starts at zero, and the draft's own norm small: what it
    reads then is the last token's embedding, which would make the output sure of that very token.
    """
    torch.manual_seed(settings.seed)
    draft = ReducedDraft(draft_config(target, settings, len(proposable)))
    draft.lm_head.tokens = proposable
    table, width = tables["embed_tokens"], settings.shape["width"]
    output = tables["output"][proposable].float()
    if (norm := tables.get("norm")) is not None and norm.shape == output.shape[1:]:
        output = output * norm.float()
    with torch.no_grad():
        into, out_of = (_basis(matrix, width) for matrix in (table.float(), output))
        for layer in draft.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        draft.model.norm.weight.fill_(_SMALL)
        draft.lm_head.linear.weight.copy_(output @ out_of)
        projected = ProjectedEmbedding(table, width)
        projected.projection.weight.copy_(into.T)
        draft.model.embed_tokens = projected
    return draft


def _basis(matrix: Tensor, width: int) -> Tensor:
    """The first `width` right singular vectors of a matrix (rows, columns), as columns; with zeros
    where there are fewer."""
    vectors = torch.linalg.eigh(matrix.T @ matrix).eigenvectors  # by increasing eigenvalues
    found = vectors.flip(1)[:, :width]
    return nn.functional.pad(found, (0, width - found.shape[1]))


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
    config = _copied_config(name, target, settings, len(proposable))
    layers = target_layers(name, settings.copied_layers)
    draft = ReducedDraft(config)
    draft.lm_head.tokens = proposable
    with torch.no_grad():
        for own, copied in zip(draft.model.layers, layers, strict=True):
            if other := own.state_dict().keys() ^ copied.keys():
                raise UserError(
                    f"{name}: not the layers of a plain Llama: {', '.join(sorted(other))}"
                )
            own.load_state_dict(copied)
        draft.model.norm.weight.copy_(tables["norm"])
        draft.model.embed_tokens.weight = _frozen(tables["embed_tokens"])
        draft.lm_head.linear.weight = _frozen(tables["output"][proposable])
    return draft


def trained_draft(name: str, target: str) -> ReducedDraft:
    """The draft of that name, to be trained further, for the target of that name. Raises
    :class:`UserError` where there is no such draft, or it is for another target."""
    if names_head(name):
        raise UserError(f"{name}: an EAGLE head, which `specdec train eagle` trains")
    if not isinstance(load_config(name), ReducedDraftConfig):
        raise UserError(f"{name}: no draft with a reduced vocabulary, which alone is trained here")
    return load_reduced(name, target, torch.float32)


def continued_draft(name: str, target: str, tables: Mapping[str, Tensor]) -> ReducedDraft:
    """The trained draft of that name, for the target of that name with these tables. Raises
    :class:`UserError` as :func:`trained_draft`."""
    draft, projection = trained_draft(name, target), stored_projection(name)
    if projection is None:
        for shared in (draft.model.embed_tokens, draft.lm_head.linear):
            shared.requires_grad_(False)
        return draft
    projected = ProjectedEmbedding(tables["embed_tokens"], len(projection))
    with torch.no_grad():
        projected.projection.weight.copy_(projection)
    draft.model.embed_tokens = projected
    return draft


def _frozen(table: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(table.float(), requires_grad=False)


def _copied_config(
    name: str, target: PretrainedConfig, settings: DraftTrainingSettings, proposed: int
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
            "reduced": {"draft_vocab_size": proposed},
        }
    )


def _is_llama(config: PretrainedConfig) -> bool:
    """Whether its layers compute what a Llama's with the same configuration do."""
    windowless = getattr(config, "sliding_window", None) is None
    return config.model_type == "llama" or (config.model_type == "mistral" and windowless)
