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
from specdec_core.models.reading import reading
from specdec_core.models.weight_files import read_tensors


def target_embedding(name: str) -> Tensor:
    """What the target of that name, as :func:`located` takes it, embeds its tokens as
    (vocabulary, width).

    A plain table in safetensors is read alone. Of any other target the model is loaded for it.

    Raises:
        UserError: the target's weights are not on this machine, or cannot be read.
    """

    def table(model: PreTrainedModel) -> Tensor:
        embedding: Any = model.get_input_embeddings()
        everything: Tensor = embedding(torch.arange(embedding.num_embeddings))
        return everything

    # A subclass of a table may do more than look up.
    return _read(
        name, "embedding", lambda m: _module(m.get_input_embeddings(), nn.Embedding), table
    )


def target_output(name: str) -> Tensor:
    """The matrix of that target's output layer (vocabulary, width), read like its embedding. That
    its logits are a product with it is for the caller to know.

    Raises:
        UserError: the target's weights are not on this machine, or cannot be read.
    """

    def module(model: PreTrainedModel) -> nn.Module | None:
        if model.config.get_text_config(decoder=True).tie_word_embeddings:
            return _module(model.get_input_embeddings(), nn.Embedding)
        return _module(model.get_output_embeddings(), nn.Linear)

    def table(model: PreTrainedModel) -> Tensor:
        output: Any = model.get_output_embeddings()
        weight: Tensor = output.weight.detach()
        return weight

    return _read(name, "output layer", module, table)


def target_layers(name: str, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """The tensors of that Llama-like target's decoder layers with these numbers, by their names
    within a layer.

    Raises:
        UserError: the target has no such layers, or its weights cannot be read.
    """
    prefixes = {number: f"model.layers.{number}." for number in numbers}
    starts = tuple(prefixes.values())
    found = read_tensors(model_folder(name), name, lambda key: key.startswith(starts))
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
    module: Callable[[PreTrainedModel], nn.Module | None],
    table: Callable[[PreTrainedModel], Tensor],
) -> Tensor:
    """The weight of a `module` where it is a file's by the model's own name for it, else the
    `table` of the loaded model."""
    skeleton = load_skeleton(name)
    wanted = module(skeleton)
    keys = {f"{key}.weight" for key, some in skeleton.named_modules() if some is wanted}
    folder = model_folder(name)
    if found := read_tensors(folder, name, keys.__contains__):
        return next(iter(found.values()))
    whole = load_weights(name, "auto")
    with reading(name, f"read its {what}", folder), torch.no_grad():
        return table(whole)


def _module(module: Any, plain: type[nn.Module]) -> nn.Module | None:
    return module if type(module) is plain else None
