"""Give a head the tensors of a file."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec_core.base.errors import UserError
from specdec_core.models.draft_vocabulary import draft_vocabulary
from specdec_core.models.eagle.any_head import AnyHead
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.weight_files import check_tensors

EMBEDDING = "embed_tokens.weight"
BUFFERS = ("d2t", "t2d")


def fill(head: AnyHead, tensors: dict[str, Tensor], dtype: torch.dtype, name: str) -> None:
    """Give a head without weights those of a file, in `dtype` where they are floats.

    Raises:
        UserError: tensors are missing, unknown, of other shapes or quantised.
    """
    tensors = {key: value for key, value in tensors.items() if not key.endswith("inv_freq")}
    embedding = tensors.pop(EMBEDDING, None)
    if isinstance(head, EagleHead):
        if "lm_head.weight" not in tensors:
            raise UserError(f"{name}: no output layer (lm_head.weight)")
        sizes = head.settings.draft_vocab_size, head.settings.vocab_size
        tensors |= draft_vocabulary(tensors, *sizes, name)
    expected = {key: tuple(tensor.shape) for key, tensor in head.state_dict().items()}
    settings = head.settings
    if embedding is not None:
        tensors[EMBEDDING] = embedding
        expected[EMBEDDING] = (settings.vocab_size, settings.hidden_size)
    elif settings.hidden_size != settings.target_hidden_size:
        raise UserError(
            f"{name}: no embed_tokens, but the target's embedding is {settings.target_hidden_size}"
            f" wide and the head {settings.hidden_size}"
        )
    check_tensors(tensors, expected, name)
    tensors = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }
    if embedding is not None:
        head.embed_tokens = nn.Embedding.from_pretrained(tensors[EMBEDDING], freeze=True)
    head.load_state_dict(tensors, assign=True)
