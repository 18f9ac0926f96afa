"""A head as another program reads it, whatever format it was had in: made once, then kept."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, TypeGuard

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.base.files import alone
from specdec_core.base.workspace import kept_folder
from specdec_core.models.eagle.formats import specforge
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.loading import load_head, read_card, save_head

Form = Literal["speculators", "specforge"]  # which vLLM reads; and SGLang and TensorRT-LLM


def exported_head(
    name: str,
    fingerprint: str,
    target_config: PretrainedConfig,
    dtype: torch.dtype,
    form: Form = "speculators",
) -> Path:
    """The folder of a head, whose weights have this `fingerprint`, in a format and this data type.
    Its verifier's name is the place that the target was loaded from: others know none of our names
    of models.

    Raises:
        UserError: the format has no place for it.
    """
    place = target_config.name_or_path or read_card(name).target
    place = str(Path(place).resolve()) if Path(place).exists() else place
    facts = hashlib.sha256(f"{form} {place}".encode()).hexdigest()[:8]
    kept = f"{fingerprint}-{str(dtype).removeprefix('torch.')}-{facts}"
    folder = kept_folder("heads") / kept
    if folder.is_dir():
        return folder
    head = load_head(name, target_config, dtype=dtype)
    if not exportable(head, target_config):
        raise UserError(
            f"{name}: reads what the target's output layer reads, as EAGLE-1 heads do; the format"
            f" {form} has no place for it"
        )
    layers = target_config.get_text_config(decoder=True).num_hidden_layers
    if form == "specforge" and (reason := specforge.lacks(head.settings, layers)):
        raise UserError(f"{name}: the format {form} has no place for it: {reason}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        if not folder.is_dir():  # not made by another process meanwhile, which serves it
            card = read_card(name).model_copy(update={"target": place})
            save_head(head, folder, card, form=form, dtype=dtype)
    return folder


def exportable(head: nn.Module, target_config: PretrainedConfig) -> TypeGuard[EagleHead]:
    """Whether a draft is a head whose features vLLM computes: the number of layers stands for the
    state before the target's norm there, and for that after it here."""
    last = target_config.get_text_config(decoder=True).num_hidden_layers
    return isinstance(head, EagleHead) and max(head.settings.feature_layers) < last
