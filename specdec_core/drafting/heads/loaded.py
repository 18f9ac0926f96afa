"""A trained head as policies call it, after every candidate token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.modules import Head, join_features


class LoadedHead:
    """Predicts in float32 from plain tensors: called for one row at a time, a module's own
    overhead would cost as much as its arithmetic."""

    def __init__(self, head: Head, card: HeadCard, device: str | torch.device = "cpu") -> None:
        self.card = card
        state = {k: v.detach().to(device, torch.float32) for k, v in head.state_dict().items()}
        self._scale = state["scale"]
        self._shift = -state["mean"] * state["scale"]
        self._layers = [
            (state[f"layers.{i}.weight"], state[f"layers.{i}.bias"])
            for i in range(len(head.layers))
        ]
        self._output = (state["output.weight"], state["output.bias"])
        self._residual = head.residual

    @torch.inference_mode()
    def probabilities(
        self, hidden: Tensor | None, top_probs: Tensor | None = None, entropy: Tensor | None = None
    ) -> Tensor:
        """Acceptance probabilities (n,) in float32 of n candidates; the arguments are those of
        :func:`~specdec_core.drafting.heads.modules.join_features`."""
        h = join_features(self.card.kind, hidden, top_probs, entropy)
        h = torch.addcmul(self._shift, h.float(), self._scale)
        for weight, bias in self._layers:
            z = F.linear(h, weight, bias)
            h = F.silu(z).add_(h) if self._residual else F.relu_(z)
        return F.linear(h, *self._output).squeeze(-1).sigmoid_()
