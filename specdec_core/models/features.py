"""The inputs of a model's layers: the features that EAGLE heads draft from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from specdec_core.base.errors import UserError


class LayerInputs:
    """The inputs of some layers of a model in its last forward.

    Number i of `layers` is the input of decoder layer i; the number of layers is the output of the
    last one as the output layer reads it, normalised. Raises :class:`UserError` where there is no
    such layer, or the model's layers cannot be found.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        modules = decoder_layers(model)
        if unknown := [layer for layer in layers if not 0 <= layer <= len(modules)]:
            raise UserError(
                f"{model.config.model_type}: features of layer {unknown[0]}, but the model has"
                f" {len(modules)}"
            )
        self._inputs: dict[int, Tensor] = {}
        self._hooks = []
        for layer in dict.fromkeys(layers):
            if layer < len(modules):
                keep = partial(_keep_input, self._inputs, layer)
                hook = modules[layer].register_forward_pre_hook(keep, with_kwargs=True)
            else:
                # Not the base model: one that has its layers in a decoder may be passed over.
                owner = next(m for m in model.modules() if any(c is modules for c in m.children()))
                hook = owner.register_forward_hook(partial(_keep_output, self._inputs, layer))
            self._hooks.append(hook)
        # The model holds its hooks, which hold the inputs alone: else they would be kept for ever.
        weakref.finalize(self, _remove, self._hooks)

    def take(self) -> Tensor:
        """Remove and return the inputs of the last forward, side by side (…, layers · width)."""
        inputs = torch.cat([self._inputs[layer] for layer in self.layers], dim=-1)
        self._inputs.clear()
        return inputs

    def remove(self) -> None:
        """Remove the hooks from the model."""
        _remove(self._hooks)


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _keep_input(
    inputs: dict[int, Tensor], layer: int, _: nn.Module, args: Any, options: dict[str, Any]
) -> None:
    inputs[layer] = args[0] if args else options["hidden_states"]


def _keep_output(
    inputs: dict[int, Tensor], layer: int, _: nn.Module, args: Any, output: Any
) -> None:
    inputs[layer] = output[0]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of any transformers model. Raises :class:`UserError` where they cannot be
    found."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise UserError(f"{model.config.model_type}: its decoder layers cannot be found")
    # Of layers within layers the outermost come first.
    return lists[0]
