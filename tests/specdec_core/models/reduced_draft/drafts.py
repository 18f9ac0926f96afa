"""A draft with a reduced vocabulary for a pair of the tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdec_core.config import PairSpec
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.pair import Pair, load_pair
from specdec_core.models.reduced_draft.model import ReducedDraft, ReducedDraftConfig
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


TABLES = ("projected", "target")  # the tables that a draft has


def reduced_of(spec: PairSpec, size: int, width: int, tables: str) -> Reduced:
    """What is special about a draft of `size` tokens for the target of `spec`."""
    return Reduced(
        draft_vocab_size=size,
        target=spec.target,
        target_fingerprint=fingerprint(spec.target),
        target_width=width,
        projected=tables == "projected",
    )


def write_draft(
    spec: PairSpec, folder: Path, proposable: list[int], tables: str = "projected"
) -> ReducedDraft:
    """Write such a draft for the target of `spec`, with these :data:`TABLES`, into `folder`;
    returns the draft that reading the folder gives."""
    target: Any = AutoModelForCausalLM.from_pretrained(spec.target, dtype=torch.float32)
    width = target.config.hidden_size
    reduced = reduced_of(spec, len(proposable), width, tables)
    draft = draft_of(target.config, proposable, hidden_size=16 if reduced.projected else width)
    table, projection = target.get_input_embeddings().weight.detach(), None
    if reduced.projected:
        projection = torch.randn(16, width, generator=torch.Generator().manual_seed(1))
        draft.model.embed_tokens.weight.data = table @ projection.T
    else:
        draft.model.embed_tokens.weight.data = table
        draft.lm_head.linear.weight.data = target.get_output_embeddings().weight[proposable]
    folder.mkdir()
    save_reduced(draft, projection, reduced, folder)
    return draft


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
    """The tiny pair with a draft that lacks every fifth token."""
    pair = _plain(spec, spec.drafts)
    return replace(pair, drafts={"draft": narrowed(pair.drafts["draft"], _some(pair))})


def copied_pair(spec: PairSpec, folder: Path) -> Pair:
    """The tiny target, and a stored draft of the target's layers with some noise, its embedding and
    most of its output layer."""
    pair = _plain(spec, {})
    draft, width = narrowed(pair.target, _some(pair)), pair.target.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    for weight in draft.model.layers.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data += 0.1 * weight.std(correction=0) * noise
    folder.mkdir()
    reduced = reduced_of(spec, len(draft.lm_head.tokens), width, "target")
    save_reduced(draft, None, reduced, folder)
    return _plain(spec, {"draft": str(folder)})


def _plain(spec: PairSpec, drafts: dict[str, str]) -> Pair:
    """A pair with its weights as they are."""
    return load_pair(spec.with_runner(pack=False).model_copy(update={"drafts": drafts}))


def _some(pair: Pair) -> list[int]:
    """All tokens but every fifth."""
    return [token for token in range(pair.target.config.vocab_size) if token % 5]
