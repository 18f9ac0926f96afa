"""Give a head the tensors of a file."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec_core.base.errors import UserError
from specdec_core.models.eagle.any_head import AnyHead
from specdec_core.models.eagle.checks import draft_vocabulary
from specdec_core.models.eagle.head import EagleHead

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
        tensors |= draft_vocabulary(tensors, head.settings, name)
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
    _check_tensors(tensors, expected, name)
    tensors = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }
    if embedding is not None:
        head.embed_tokens = nn.Embedding.from_pretrained(tensors[EMBEDDING], freeze=True)
    head.load_state_dict(tensors, assign=True)


def _check_tensors(
    tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], name: str
) -> None:
    """Raises :class:`UserError` for tensors of other names, shapes or kinds."""
    for what, keys in (
        ("unknown tensors", tensors.keys() - expected.keys()),
        ("missing tensors", expected.keys() - tensors.keys()),
    ):
        if keys:
            some = ", ".join(sorted(keys)[:3]) + (", …" if len(keys) > 3 else "")
            raise UserError(f"{name}: {what}: {some}")
    for key, tensor in tensors.items():
        if tuple(tensor.shape) != expected[key]:
            raise UserError(
                f"{name}: {key} has the shape {tuple(tensor.shape)}, not {expected[key]}"
            )
        if key not in BUFFERS and not tensor.is_floating_point():
            raise UserError(f"{name}: {key} is quantised ({tensor.dtype}) in a way that is unknown")
