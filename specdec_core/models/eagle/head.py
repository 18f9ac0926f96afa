"""An EAGLE-3 head: one decoder layer over the embedding of a token and the target's features before
it, which predicts the token after it.

At token t the layer reads cat(embedding of x_t, g_{t-1}), where g = fc(features of the target's
layers) as long as the target has read x_{t-1}, and the head's own state after it from there on.
Parameters are named as in the format of *speculators*.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec_core.models.draft_vocabulary import spread
from specdec_core.models.eagle.any_head import AnyHead, attending
from specdec_core.models.eagle.settings import EagleSettings


class EagleLayer(nn.Module):
    """The decoder layer, whose queries, keys and values read two states side by side."""

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
        """The state after each token, of the embeddings and the states before, (…, n, width)
        each."""
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=both, **attention)
        state = residual + attended
        after: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return after


class EagleHead(AnyHead):
    """A head with its own output layer over the tokens `i + d2t[i]` of the target's vocabulary."""

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

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.normed(states))
        return logits

    def spread(self, logits: Tensor) -> Tensor:
        if logits.shape[-1] == self.settings.vocab_size:
            return logits
        return spread(logits, self.proposable, self.settings.vocab_size)

    def _after(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        after: Tensor = self.layers[0](embedded, states, **attention)
        return after
