"""The folder of a draft with a reduced vocabulary: the files of a Llama, with `d2t` and matrices in
eight bits.

A draft between its target's own embedding and output layer stores neither. Any other draft stores a
projection of the target's embedding, and the output layer's rows of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_core.base.errors import UserError
from specdec_core.config import Value, parse
from specdec_core.models import int8
from specdec_core.models.draft_vocabulary import draft_vocabulary
from specdec_core.models.fingerprints import fingerprint, model_folder
from specdec_core.models.loading import load_config
from specdec_core.models.reduced_draft.model import ReducedDraft, ReducedDraftConfig
from specdec_core.models.reduced_draft.target_tables import target_embedding, target_output
from specdec_core.models.weight_files import WEIGHTS, check_tensors, read_tensors

_EMBEDDING, _OUTPUT, _TOKENS = (
    "model.embed_tokens.weight",
    "lm_head.linear.weight",
    "lm_head.tokens",
)
# As they are called in the file.
_STORED_OUTPUT, PROJECTION, _OFFSETS = "lm_head.weight", "projection", "d2t"


class Reduced(Value):
    """What is special about the draft, under `reduced` in its `config.json`."""

    draft_vocab_size: int = Field(ge=2, description="tokens that it can propose")
    projected: bool = Field(
        description="true: a projection of the target's embedding and an output layer of its own;"
        " false: the target's embedding and rows of its output layer"
    )
    target: str = Field(description="name of the target that it drafts for")
    target_fingerprint: str = Field(description="of that target's weights")
    target_width: int = Field(ge=1, description="of the target's embedding")


def reduced_of(config: ReducedDraftConfig, name: str) -> Reduced:
    """What its configuration says of the draft. Raises :class:`UserError` where it is damaged."""
    reduced = parse(Reduced, config.reduced, f"{name}: config.json: reduced")
    if reduced.draft_vocab_size > config.vocab_size:
        raise UserError(
            f"{name}: proposes {reduced.draft_vocab_size} tokens of a vocabulary of"
            f" {config.vocab_size}"
        )
    if not reduced.projected and config.hidden_size != reduced.target_width:
        raise UserError(
            f"{name}: is {config.hidden_size} wide, but shares tables of a target of"
            f" {reduced.target_width}"
        )
    return reduced


def load_reduced(name: str, target: str, dtype: torch.dtype) -> ReducedDraft:
    """The draft of that name, for the `target` of that name; on the CPU and in evaluation mode.
    Raises :class:`UserError` where it is damaged or for another target, or the target's embedding
    cannot be read."""
    config = load_config(name)
    assert isinstance(config, ReducedDraftConfig)
    reduced = reduced_of(config, name)
    if reduced.target_fingerprint != (weights_here := fingerprint(target)):
        raise UserError(
            f"{name}: was trained for another target (weights {reduced.target_fingerprint}, this"
            f" target's are {weights_here})"
        )
    tensors = int8.unpacked(read_tensors(model_folder(name), name), name)
    with torch.device("meta"):
        model = ReducedDraft(config)
    _check(model, reduced, tensors, name)
    tokens = (
        torch.arange(reduced.draft_vocab_size)
        + draft_vocabulary(tensors, reduced.draft_vocab_size, config.vocab_size, name)["d2t"]
    )
    wide = target_embedding(target)
    if wide.shape != (config.vocab_size, reduced.target_width):
        raise UserError(
            f"{name}: reads an embedding of {(config.vocab_size, reduced.target_width)}, but"
            f" that of {target} is {tuple(wide.shape)}"
        )
    if reduced.projected:
        tensors[_EMBEDDING] = wide.float() @ tensors.pop(PROJECTION).float().T
        tensors[_OUTPUT] = tensors.pop(_STORED_OUTPUT)
    else:
        tensors[_EMBEDDING], tensors[_OUTPUT] = wide, target_output(target)[tokens]
    del tensors[_OFFSETS]
    weights = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    model.load_state_dict({**weights, _TOKENS: tokens}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # no file has its frequencies
    model.train(False)
    return model


def stored_projection(name: str) -> Tensor | None:
    """The projection of the target's embedding (width, target width) in the draft of that name;
    None where it has the target's own tables. Raises :class:`UserError` where it is damaged."""
    tensors = read_tensors(model_folder(name), name, lambda key: key.startswith(PROJECTION))
    return int8.unpacked(tensors, name).get(PROJECTION)


def save_reduced(
    model: ReducedDraft, projection: Tensor | None, reduced: Reduced, folder: Path
) -> None:
    """Write a draft into `folder`, which exists.

    Args:
        model: on any device.
        projection: of the target's embedding (width, target width); None where the draft has none.
        reduced: what is special about it.
        folder: where to.
    """
    tensors: dict[str, Tensor] = dict(model.state_dict())
    tokens, output = tensors.pop(_TOKENS).cpu(), tensors.pop(_OUTPUT)
    inner = _EMBEDDING.removesuffix("weight")
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(inner)}
    if projection is not None:
        tensors |= {PROJECTION: projection, _STORED_OUTPUT: output}
    tensors[_OFFSETS] = tokens - torch.arange(len(tokens))
    config = deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.reduced = reduced.model_dump(mode="json")
    stored = {key: _stored(tensor) for key, tensor in int8.packed(tensors).items()}
    (folder / WEIGHTS).write_bytes(save(stored, metadata={"format": "pt"}))
    config.save_pretrained(folder)


def _stored(tensor: Tensor) -> Tensor:
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).contiguous()


def _check(model: ReducedDraft, reduced: Reduced, tensors: Mapping[str, Tensor], name: str) -> None:
    """Raises :class:`UserError` unless the tensors are what the model's file must have."""
    shapes: dict[str, Any] = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    shapes[_OFFSETS], output = shapes.pop(_TOKENS), shapes.pop(_OUTPUT)
    width = shapes.pop(_EMBEDDING)[1]
    if reduced.projected:
        shapes |= {_STORED_OUTPUT: output, PROJECTION: (width, reduced.target_width)}
    check_tensors(tensors, shapes, name)
