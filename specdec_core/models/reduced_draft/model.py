"""A Llama with an output layer over some tokens of the vocabulary, and its configuration.

Its logits are spread over the whole vocabulary, so that it is used like any draft model. A token
outside the draft vocabulary has probability 0, which is lossless: the target can still choose it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec_core.models.draft_vocabulary import spread

KIND = "specdec_reduced_draft"


class ReducedDraftConfig(LlamaConfig):
    """A Llama's, with the whole vocabulary, and `reduced`, the values of :class:`Reduced`."""

    model_type = KIND
    tie_word_embeddings: bool = False
    reduced: dict[str, Any] | None = None


class SpreadOutput(nn.Module):
    """An output layer over the tokens of a draft vocabulary, with logits over the whole one."""

    tokens: Tensor  # of the draft vocabulary, increasing (draft vocabulary,)

    def __init__(self, width: int, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.linear = nn.Linear(width, draft_vocab_size, bias=False)
        self.register_buffer("tokens", torch.arange(draft_vocab_size))

    def forward(self, states: Tensor) -> Tensor:
        """(…, vocabulary) of (…, width)."""
        return spread(self.linear(states), self.tokens, self.vocab_size)


class ReducedDraft(LlamaForCausalLM):
    """A Llama with a :class:`SpreadOutput`."""

    config_class = ReducedDraftConfig

    def __init__(self, config: ReducedDraftConfig) -> None:
        super().__init__(config)
        self._tied_weights_keys = {}  # the output layer has other tokens than the embedding
        size = (config.reduced or {})["draft_vocab_size"]
        self.lm_head = SpreadOutput(config.hidden_size, size, config.vocab_size)


AutoConfig.register(KIND, ReducedDraftConfig)
AutoModelForCausalLM.register(ReducedDraftConfig, ReducedDraft)
