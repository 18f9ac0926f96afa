"""The head of EAGLE and EAGLE-2: one decoder layer over a token and the state that the target's
output layer read before it, which predicts the next such state.

At token t the layer reads fc(cat(embedding of x_t, f_{t-1})), where f_{t-1} is the target's state
as long as the target has read x_{t-1}, and the head's own from there on. Logits are those of the
target's own output layer. Parameters are named as in the authors' checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specdec_core.models.eagle.settings import EagleSettings


class EagleOneLayer(nn.Module):
    """The decoder layer: Llama's, whose attention reads states that are not normed."""

    def __init__(self, config: Any, qkv_bias: bool) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx=0)
        if qkv_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(self.self_attn, name)
                setattr(self.self_attn, name, nn.Linear(plain.in_features, plain.out_features))
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, state: Tensor, **attention: Any) -> Tensor:
        """(…, n, width) of as many."""
        attended, _ = self.self_attn(hidden_states=state, **attention)
        state = state + attended
        after: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return after


class EagleOneHead(nn.Module):
    """A head with the interface of :class:`EagleHead`, whose one feature is what the target's
    output layer reads, and which proposes any token.

    `lm_head` is the target's output layer, and `embed_tokens` its embedding, unless the head brings
    one.
    """

    def __init__(
        self, settings: EagleSettings, fc_bias: bool = True, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.settings = settings
        self.config = settings.layer_config()
        self.config._attn_implementation = "sdpa"
        self.fc = nn.Linear(2 * settings.hidden_size, settings.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([EagleOneLayer(self.config, qkv_bias)])
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None

    @property
    def proposable(self) -> Tensor:
        """The target's tokens, all of them."""
        return torch.arange(self.settings.vocab_size, device=self.fc.weight.device)

    def fused(self, features: Tensor) -> Tensor:
        """The feature (…, width) itself."""
        return features

    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """The state that the head expects after each token, (batch, n, width); arguments as of
        :meth:`EagleHead.forward`."""
        assert self.embed_tokens is not None, "the target's embedding is needed"
        embedded = self.embed_tokens(tokens).to(states.dtype)
        after: Tensor = self.layers[0](
            self.fc(torch.cat([embedded, states], dim=-1)),
            position_embeddings=self.rotary(embedded, positions),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        return after

    def normed(self, states: Tensor) -> Tensor:
        """What the output layer reads of these states: all of them."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Of the vocabulary (…, vocabulary), after these states."""
        assert self.lm_head is not None, "the target's output layer is needed"
        logits: Tensor = self.lm_head(states)
        return logits

    def spread(self, logits: Tensor) -> Tensor:
        """The logits themselves, for they are of the target's vocabulary."""
        return logits
