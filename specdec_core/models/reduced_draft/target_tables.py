"""A target's embedding and output layer, and some of its decoder layers, read from its files:
drafts are the same in every process, whether or not it has the target in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_core.base.errors import UserError
from specdec_core.models.fingerprints import model_folder
from specdec_core.models.loading import load_skeleton, load_weights
from specdec_core.models.reading import COMPUTED, reading
from specdec_core.models.weight_files import read_tensors


def target_embedding(name: str) -> Tensor:
    """The embeddings of all tokens of the target of that name (vocabulary, width).

    A plain table in safetensors is read without the rest of the model. Otherwise the model is
    loaded. Raises :class:`UserError` where the target's weights are not on this machine, or cannot
    be read.
    """
    return _read(
        name,
        "embedding",
        lambda model: model.get_input_embeddings(),
        lambda embedding: embedding(torch.arange(embedding.num_embeddings)),
    )


def target_output(name: str) -> Tensor:
    """The matrix of that target's output layer (vocabulary, width), read like its embedding. The
    caller knows that the logits are a product with it. Raises :class:`UserError` where the target's
    weights are not on this machine, or cannot be read."""

    def layer(model: PreTrainedModel) -> Any:
        tied = model.config.get_text_config(decoder=True).tie_word_embeddings
        return model.get_input_embeddings() if tied else model.get_output_embeddings()

    return _read(name, "output layer", layer, lambda output: output.weight.detach())


def target_layers(name: str, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """The tensors of that Llama-like target's decoder layers with these numbers, by their names
    within a layer, without tables that models now compute. Raises :class:`UserError` where the
    target has no such layers, or its weights cannot be read."""
    prefixes = {number: f"model.layers.{number}." for number in numbers}
    starts = tuple(prefixes.values())

    def wanted(key: str) -> bool:
        return key.startswith(starts) and not COMPUTED.search(key)

    found = read_tensors(model_folder(name), name, wanted)
    layers = [
        {key.removeprefix(prefix): found[key] for key in found if key.startswith(prefix)}
        for prefix in prefixes.values()
    ]
    for number, layer in zip(numbers, layers, strict=True):
        if not layer:
            raise UserError(f"{name}: has no decoder layer {number} by a Llama's name for it")
    return layers


def _read(
    name: str,
    what: str,
    module_of: Callable[[PreTrainedModel], Any],
    table_of: Callable[[Any], Tensor],
) -> Tensor:
    """The weight of a plain module, where a file has it by the model's name for it; else the table
    that the module of the loaded model gives."""
    skeleton, folder = load_skeleton(name), model_folder(name)
    module = module_of(skeleton)
    if type(module) in (nn.Embedding, nn.Linear):  # a subclass may do more
        keys = {f"{key}.weight" for key, some in skeleton.named_modules() if some is module}
        if found := read_tensors(folder, name, keys.__contains__):
            return next(iter(found.values()))
    whole = load_weights(name, "auto")
    with reading(name, f"read its {what}", folder), torch.no_grad():
        return table_of(module_of(whole))
