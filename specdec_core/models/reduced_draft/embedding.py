"""A target's embedding, read from its files: drafts are the same in every process, whether or not
it has the target in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec_core.base.errors import UserError
from specdec_core.models.fingerprints import model_folder, weight_files

_FAULTS = (OSError, ValueError, KeyError, RuntimeError)


def target_embedding(name: str) -> Tensor:
    """What the target of that name, as :func:`located` takes it, embeds its tokens as
    (vocabulary, width).

    A plain table in safetensors is read alone. Of any other target the model is loaded for it.

    Raises:
        UserError: the target's weights are not on this machine, or cannot be read.
    """
    folder = model_folder(name)
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        found = _table(skeleton, name, folder)
        if found is not None:
            return found
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        embedding: Any = whole.get_input_embeddings()
        with torch.no_grad():
            everything: Tensor = embedding(torch.arange(embedding.num_embeddings))
        return everything
    except _FAULTS as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise UserError(f"{name}: its embedding cannot be read: {reason.strip()}") from None


def _table(skeleton: PreTrainedModel, name: str, folder: Path) -> Tensor | None:
    """The embedding of a target whose file has it by the model's own name for it."""
    embedding = skeleton.get_input_embeddings()
    if type(embedding) is not nn.Embedding:  # a subclass may do more than look up
        return None
    key = next(key for key, module in skeleton.named_modules() if module is embedding) + ".weight"
    for file in weight_files(name, folder):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as content:
                if key in content.keys():  # noqa: SIM118 (it is no mapping)
                    table: Tensor = content.get_tensor(key)
                    return table
    return None
