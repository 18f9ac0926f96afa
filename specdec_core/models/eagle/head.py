"""EAGLE heads: one decoder layer over a token and a state before it, which predicts the next token.

At token t the state is g_{t-1}. It is made of the target's features as long as the target was fed
x_{t-1}; from there on it is the head's own state after x_{t-1}.

- An EAGLE-3 head reads cat(embedding of x_t, g_{t-1}), where g = fc(features of several of the
  target's layers). Its parameters are named as in the format of *speculators*.
- The head of EAGLE and EAGLE-2 reads fc(cat(embedding of x_t, f_{t-1})), where f is what the
  target's output layer reads, and predicts the next such state. The target's own
  output layer gives its logits. Its parameters are named as in the authors' checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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

from specdec_core.models.draft_vocabulary import spread
from specdec_core.models.eagle.settings import EagleSettings


class AnyHead(nn.Module, ABC):
    """What heads of all generations have in common. The embedding `embed_tokens` and the output
    layer `lm_head` are the head's own or the target's; None until the target's are set."""

    layers: nn.ModuleList  # with the one decoder layer
    lm_head: nn.Module | None

    def __init__(self, settings: EagleSettings) -> None:
        super().__init__()
        self.settings = settings
        self.config = settings.layer_config()
        self.config._attn_implementation = "sdpa"
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.embed_tokens: nn.Module | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The data type of its layer: the target's, for a head that was loaded with it."""
        return next(self.layers.parameters()).dtype

    @property
    def proposable(self) -> Tensor:
        """The ids of the tokens that the head can propose, increasing; by default all."""
        device = next(self.layers.parameters()).device
        return torch.arange(self.settings.vocab_size, device=device)

    def fused(self, features: Tensor) -> Tensor:
        """The state (…, width) made of the target's features, (…, layers · target width)."""
        return features

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
            positions: (batch, n); only their differences matter.
            attention_mask: as transformers' attention takes it, or a :class:`RowMask`.
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

    def normed(self, states: Tensor) -> Tensor:
        """The input of the output layer after these states, (…, width)."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """The logits (…, draft vocabulary) after these states."""
        assert self.lm_head is not None, "the target's output layer is needed"
        logits: Tensor = self.lm_head(self.normed(states))
        return logits

    def spread(self, logits: Tensor) -> Tensor:
        """The same logits over the target's vocabulary (n, vocabulary)."""
        if logits.shape[-1] == self.settings.vocab_size:
            return logits
        return spread(logits, self.proposable, self.settings.vocab_size)

    @abstractmethod
    def _after(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        """The state after each token, from its embedding and the state before it, (batch, n, width)
        each."""


def attending(config: Any, inputs: int, biased: bool | None = None) -> Any:
    """Llama's attention over states of width `inputs`; `biased` overrides the configuration's
    biases."""
    attention = LlamaAttention(config, layer_idx=0)
    for name in ("q_proj", "k_proj", "v_proj"):
        plain = getattr(attention, name)
        bias = plain.bias is not None if biased is None else biased
        setattr(attention, name, nn.Linear(inputs, plain.out_features, bias=bias))
    return attention


class EagleLayer(nn.Module):
    """The decoder layer of an EAGLE-3 head. Its attention reads two states side by side."""

    def __init__(self, settings: EagleSettings, config: Any) -> None:
        super().__init__()
        width, eps = settings.hidden_size, settings.rms_norm_eps
        self.norm_before_residual = settings.norm_before_residual
        self.self_attn = attending(config, 2 * width)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)

    def forward(self, embedded: Tensor, state: Tensor, **attention: Any) -> Tensor:
        """See :meth:`AnyHead._after`."""
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=both, **attention)
        state = residual + attended
        after: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return after


class EagleHead(AnyHead):
    """An EAGLE-3 head, with its own output layer over the tokens `i + d2t[i]`."""

    lm_head: nn.Linear
    d2t: Tensor  # (draft vocabulary,) offsets
    t2d: Tensor  # (vocabulary,) whether the head can propose a token

    def __init__(self, settings: EagleSettings) -> None:
        super().__init__(settings)
        features = len(settings.feature_layers) * settings.target_hidden_size
        width, eps = settings.hidden_size, settings.rms_norm_eps
        self.fc = nn.Linear(features, width, bias=False)
        if settings.norm_before_fc:
            self.input_norm = LlamaRMSNorm(features, eps)
        self.layers = nn.ModuleList([EagleLayer(settings, self.config)])
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, settings.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(settings.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(settings.vocab_size) < settings.draft_vocab_size)

    @property
    def proposable(self) -> Tensor:
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def propose_only(self, tokens: Tensor) -> None:
        """Make the draft vocabulary these tokens of the target's, increasing."""
        self.d2t = tokens - torch.arange(len(tokens), device=tokens.device)
        self.t2d = torch.zeros_like(self.t2d)
        self.t2d[tokens] = True

    def fused(self, features: Tensor) -> Tensor:
        if self.settings.norm_before_fc:
            features = self.input_norm(features)
        fused: Tensor = self.fc(features)
        return fused

    def normed(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed

    def _after(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        after: Tensor = self.layers[0](embedded, states, **attention)
        return after


class EagleOneLayer(nn.Module):
    """The decoder layer of an EAGLE-1 head: Llama's, with attention over states without a norm."""

    def __init__(self, config: Any, qkv_bias: bool) -> None:
        super().__init__()
        self.self_attn = attending(config, config.hidden_size, qkv_bias or None)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, state: Tensor, **attention: Any) -> Tensor:
        """The state (…, n, width) after each token."""
        attended, _ = self.self_attn(hidden_states=state, **attention)
        state = state + attended
        after: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return after


class EagleOneHead(AnyHead):
    """An EAGLE-1 or EAGLE-2 head. It proposes any token, by the target's output layer."""

    def __init__(
        self, settings: EagleSettings, fc_bias: bool = True, qkv_bias: bool = False
    ) -> None:
        super().__init__(settings)
        self.fc = nn.Linear(2 * settings.hidden_size, settings.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([EagleOneLayer(self.config, qkv_bias)])
        self.lm_head = None

    def _after(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        after: Tensor = self.layers[0](self.fc(torch.cat([embedded, states], dim=-1)), **attention)
        return after
