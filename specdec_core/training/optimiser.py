"""The optimiser of drafts: Muon for the matrices of layers, AdamW for the rest, as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Optimiser(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for the hidden matrices of `model` at `matrix_rate`, and AdamW for
    its embedding, output layer, norms and biases at `other_rate`. With no `matrix_rate`, AdamW for
    all."""

    def __init__(
        self,
        model: nn.Module,
        matrix_rate: float | None,
        other_rate: float,
        matrix_decay: float = 0.0,
        other_decay: float = 0.0,
    ) -> None:
        hidden, rest = list[nn.Parameter](), list[nn.Parameter]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                table = "embed" in name or "lm_head" in name
                inner = matrix_rate is not None and parameter.ndim == 2 and not table
                (hidden if inner else rest).append(parameter)
        betas = (0.9, 0.95)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=other_rate, betas=betas, weight_decay=other_decay)
        ]
        if matrix_rate is not None:
            self.parts.append(torch.optim.Muon(hidden, lr=matrix_rate, weight_decay=matrix_decay))
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
