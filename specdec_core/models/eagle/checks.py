"""What a head and its target must agree in, and a head's parts among themselves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.models.eagle.settings import EagleSettings


def check_target(settings: EagleSettings, target: PretrainedConfig, last: int, name: str) -> None:
    """Raises :class:`UserError` for a head of a target of another shape. `last` is the greatest
    number that a layer may have."""
    text = target.get_text_config(decoder=True)
    for what, of_head, of_target in (
        ("hidden states of width", settings.target_hidden_size, text.hidden_size),
        ("a vocabulary of", settings.vocab_size, text.vocab_size),
    ):
        if of_head != of_target:
            raise UserError(f"{name}: is for a target with {what} {of_head}, not {of_target}")
    layers = settings.feature_layers
    increasing = all(a < b for a, b in pairwise(layers))
    if not increasing or layers[0] < 0 or layers[-1] > last:
        raise UserError(
            f"{name}: reads the layers {list(layers)}, expected increasing numbers from 0 to {last}"
        )


def draft_vocabulary(
    tensors: Mapping[str, Tensor], settings: EagleSettings, name: str
) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a head's tensors, made where they can be inferred.

    Raises:
        UserError: the offsets are missing, lead to no increasing tokens of the target's, or
            disagree with the mask.
    """
    size, whole = settings.draft_vocab_size, settings.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if size != whole:
            raise UserError(f"{name}: no d2t, which says what its {size} tokens are of {whole}")
        d2t = torch.zeros(size, dtype=torch.long)
    if d2t.shape != (size,) or d2t.is_floating_point():
        raise UserError(f"{name}: d2t is not {size} whole numbers")
    d2t = d2t.long()
    tokens = torch.arange(size) + d2t
    if tokens.amin() < 0 or tokens.amax() >= whole:
        raise UserError(f"{name}: d2t leads outside of the target's {whole} tokens")
    if (tokens.diff() <= 0).any():
        raise UserError(f"{name}: d2t does not lead to increasing tokens")
    mask = torch.zeros(whole, dtype=torch.bool)
    mask[tokens] = True
    if t2d is not None and (t2d.shape != mask.shape or not torch.equal(t2d.bool(), mask)):
        raise UserError(f"{name}: t2d and d2t name different tokens")
    return {"d2t": d2t, "t2d": mask}
