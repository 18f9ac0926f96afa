"""What EAGLE heads of any generation have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from specdec_core.models.eagle.settings import EagleSettings


class AnyHead(nn.Module, ABC):
    """One decoder layer, which reads a token and a state before it.

    The state is :meth:`fused` of the target's features as long as the target has read the token
    before, and the head's own state after that token from there on.

    `embed_tokens` is the target's own embedding, unless the head brings one; None until it is
    given.
    """

    layers: nn.ModuleList  # the one

    def __init__(self, settings: EagleSettings) -> None:
        super().__init__()
        self.settings = settings
        self.config = settings.layer_config()
        self.config._attn_implementation = "sdpa"
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.embed_tokens: nn.Module | None = None

    @property
    @abstractmethod
    def proposable(self) -> Tensor:
        """The target's number of each token that the head can propose, increasing."""

    @abstractmethod
    def fused(self, features: Tensor) -> Tensor:
        """The state (…, width) of the target's features side by side, (…, layers · target
        width)."""

    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """The head's state after each token, (batch, n, width).

        Args:
            tokens: (batch, n).
            states: before each token (batch, n, width).
            positions: (batch, n), of which only differences matter.
            attention_mask: as transformers' attention takes it.
            past_key_values: keys and values of earlier tokens.
        """
        assert self.embed_tokens is not None, "the target's embedding is needed"
        embedded = self.embed_tokens(tokens).to(states.dtype)
        return self._after(
            embedded,
            states,
            position_embeddings=self.rotary(embedded, positions),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )

    @abstractmethod
    def normed(self, states: Tensor) -> Tensor:
        """What the output layer reads of these states, (…, width)."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Of the tokens that the head can propose (…, draft vocabulary), after these states."""

    @abstractmethod
    def spread(self, logits: Tensor) -> Tensor:
        """Logits of the target's vocabulary (n, vocabulary), of those of the head's own."""

    @abstractmethod
    def _after(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        """The state after each token, of the embeddings and the states before, (batch, n, width)
        each."""


def attending(config: Any, inputs: int, biased: bool | None = None) -> Any:
    """Llama's attention whose queries, keys and values read `inputs` numbers, with biases as the
    configuration has them or as said."""
    attention = LlamaAttention(config, layer_idx=0)
    for name in ("q_proj", "k_proj", "v_proj"):
        plain = getattr(attention, name)
        bias = plain.bias is not None if biased is None else biased
        setattr(attention, name, nn.Linear(inputs, plain.out_features, bias=bias))
    return attention
