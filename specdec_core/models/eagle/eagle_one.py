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
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec_core.models.eagle.any_head import AnyHead, attending
from specdec_core.models.eagle.settings import EagleSettings


class EagleOneLayer(nn.Module):
    """The decoder layer: Llama's, whose attention reads states that are not normed."""

    def __init__(self, config: Any, qkv_bias: bool) -> None:
        super().__init__()
        self.self_attn = attending(config, config.hidden_size, qkv_bias or None)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, state: Tensor, **attention: Any) -> Tensor:
        """(…, n, width) of as many."""
        attended, _ = self.self_attn(hidden_states=state, **attention)
        state = state + attended
        after: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return after


class EagleOneHead(AnyHead):
    """A head whose one feature is what the target's output layer reads. It proposes any token.

    `lm_head` is the target's output layer; None until it is given.
    """

    def __init__(
        self, settings: EagleSettings, fc_bias: bool = True, qkv_bias: bool = False
    ) -> None:
        super().__init__(settings)
        self.fc = nn.Linear(2 * settings.hidden_size, settings.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([EagleOneLayer(self.config, qkv_bias)])
        self.lm_head: nn.Module | None = None

    @property
    def proposable(self) -> Tensor:
        return torch.arange(self.settings.vocab_size, device=self.fc.weight.device)

    def fused(self, features: Tensor) -> Tensor:
        return features

    def normed(self, states: Tensor) -> Tensor:
        return states

    def logits(self, states: Tensor) -> Tensor:
        assert self.lm_head is not None, "the target's output layer is needed"
        logits: Tensor = self.lm_head(states)
        return logits

    def spread(self, logits: Tensor) -> Tensor:
        return logits

    def _after(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        after: Tensor = self.layers[0](self.fc(torch.cat([embedded, states], dim=-1)), **attention)
        return after
