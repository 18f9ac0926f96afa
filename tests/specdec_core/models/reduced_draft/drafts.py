"""A draft with a reduced vocabulary for a pair of the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specdec_core.config import PairSpec
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.pair import Pair, load_pair, load_tokenizer
from specdec_core.models.reduced_draft import ReducedDraft, ReducedDraftConfig
from specdec_core.models.reduced_draft.storing import Reduced, save_reduced


def draft_of(
    target: PretrainedConfig, proposable: list[int], seed: int = 0, **changes: Any
) -> ReducedDraft:
    """A draft of one layer that proposes these tokens of the target's, with random weights."""
    values = {
        "vocab_size": target.vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": target.max_position_embeddings,
        "initializer_range": 0.4,
        "reduced": {"draft_vocab_size": len(proposable)},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = ReducedDraft(ReducedDraftConfig(**{**values, **changes}))
    draft.lm_head.tokens = torch.tensor(proposable)
    return draft.eval()


def write_draft(
    spec: PairSpec, folder: Path, proposable: list[int], target: PretrainedConfig, **changes: Any
) -> tuple[ReducedDraft, Tensor | None]:
    """Write such a draft for the target of `spec` into `folder`; returns it, and its projection of
    the target's embedding where it has one."""
    reduced = Reduced(
        **{
            "draft_vocab_size": len(proposable),
            "embedding": "target",
            "target": spec.target,
            "target_fingerprint": fingerprint(spec.target),
            "target_width": target.hidden_size,
            **changes,
        }
    )
    draft = draft_of(target, proposable)
    projection = None
    if reduced.embedding == "target":
        generator = torch.Generator().manual_seed(1)
        projection = torch.randn(16, target.hidden_size, generator=generator)
    folder.mkdir()
    save_reduced(draft, projection, reduced, load_tokenizer(spec.target), folder)
    return draft, projection


def narrowed(model: PreTrainedModel, proposable: list[int]) -> ReducedDraft:
    """A Llama of the tests that proposes these tokens only."""
    config = ReducedDraftConfig(
        **{
            **model.config.to_dict(),
            "tie_word_embeddings": False,
            "reduced": {"draft_vocab_size": len(proposable)},
        }
    )
    draft = ReducedDraft(config).eval()
    draft.model.load_state_dict(model.model.state_dict())
    rows = model.get_input_embeddings().weight[proposable]
    draft.lm_head.linear.weight.data.copy_(rows)
    draft.lm_head.tokens = torch.tensor(proposable)
    return draft.to(model.device)


def narrowed_pair(spec: PairSpec) -> Pair:
    """The tiny pair, whose draft lacks every fifth token."""
    pair = load_pair(
        spec.model_copy(update={"runner": spec.runner.model_copy(update={"pack": False})})
    )
    proposable = [token for token in range(pair.target.config.vocab_size) if token % 5]
    return replace(pair, drafts={"draft": narrowed(pair.drafts["draft"], proposable)})
