"""The features of a target that another program runs, for EAGLE heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_core.models.features import LayerInputs


class TargetFeatures:
    """The features of one sequence, row 0 of :class:`specdec_core.models.eagle.runner.ReadRows`, at
    up to `positions` positions. They are taken from the model's forwards while it is watched."""

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], positions: int) -> None:
        self.feature_layers = layers
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = config.vocab_size
        self.length = 0
        width = len(layers) * config.hidden_size
        self._store = torch.empty((positions, width), dtype=model.dtype, device=model.device)
        self._model = model
        self._inputs: LayerInputs | None = None

    def begin(self) -> None:
        """Watch the model from the prefill on."""
        self.length = 0
        self._inputs = LayerInputs(self._model, self.feature_layers)

    def after_forward(self) -> None:
        """Store the features of a forward."""
        assert self._inputs is not None
        states = self._inputs.take()[0]
        end = min(self.length + len(states), len(self._store))
        self._store[self.length : end] = states[: end - self.length]
        self.length = end

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = min(self.length, length)

    def end(self) -> None:
        """Stop watching the model."""
        if self._inputs is not None:
            self._inputs.remove()
            self._inputs = None

    @property
    def lengths(self) -> list[int]:
        return [self.length]

    def features(self, rows: Sequence[int], places: Sequence[int]) -> Tensor:
        """Of the tokens at `places` (n, layers · width)."""
        return self._store[list(places)]
