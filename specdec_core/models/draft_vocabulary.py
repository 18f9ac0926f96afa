"""Drafts that propose some tokens of their target's vocabulary: the ids i + d2t[i]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec_core.base.errors import UserError

# The logit of a token that a draft cannot propose: probability 0 at any practical temperature, and
# still a finite number.
NEVER = -3e4


def spread(logits: Tensor, proposable: Tensor, vocab_size: int) -> Tensor:
    """Logits over the target's vocabulary (…, vocabulary), given the `proposable` tokens'
    logits."""
    wide = logits.new_full((*logits.shape[:-1], vocab_size), NEVER)
    return wide.index_copy(-1, proposable, logits)


def draft_vocabulary(
    tensors: Mapping[str, Tensor], size: int, whole: int, name: str
) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a draft's tensors, made where they can be inferred: offsets of its `size`
    tokens, and which of the target's `whole` vocabulary they are. Raises :class:`UserError` where
    the offsets are missing, lead to no increasing tokens of the target's, or disagree with the
    mask."""
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
