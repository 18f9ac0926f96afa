"""A head in the format that another program reads: converted once, then kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.base.files import made_once
from specdec_core.base.names import digest_name
from specdec_core.base.workspace import kept_folder
from specdec_core.models.eagle.formats import specforge
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.loading import load_head, read_card, save_head

Form = Literal["speculators", "specforge"]  # for vLLM; for SGLang and TensorRT-LLM


def exported_head(
    name: str,
    fingerprint: str,
    target_config: PretrainedConfig,
    dtype: torch.dtype,
    form: Form = "speculators",
) -> Path:
    """The folder of a head with weights of this `fingerprint`, converted to a format and data type.
    Its verifier's name is the folder or hub id of the target, because other programs do not know
    this project's names of models. Raises :class:`UserError` where the format has no place for
    it."""
    place = target_config.name_or_path or read_card(name).target
    place = str(Path(place).resolve()) if Path(place).exists() else place
    # 2: the version of what is written, now with the embedding that the head has
    facts = digest_name(f"2 {form} {place}")[:8]
    kept = f"{fingerprint}-{str(dtype).removeprefix('torch.')}-{facts}"
    folder = kept_folder("heads") / kept
    if folder.is_dir():
        return folder
    head = load_head(name, target_config, dtype=dtype)
    layers = target_config.get_text_config(decoder=True).num_hidden_layers
    # The number of layers as a feature stands for the last layer's output before the target's norm
    # in vLLM, and after it in this project.
    if not isinstance(head, EagleHead) or max(head.settings.feature_layers) >= layers:
        raise UserError(
            f"{name}: reads what the target's output layer reads, as EAGLE-1 heads do; the format"
            f" {form} has no place for it"
        )
    if form == "specforge" and (reason := specforge.lacks(head.settings, layers)):
        raise UserError(f"{name}: the format {form} has no place for it: {reason}")
    card = read_card(name).model_copy(update={"target": place})
    own = head.embed_tokens is not None
    save = partial(save_head, head, folder, card, form=form, dtype=dtype, embedding=own)
    return made_once(folder, save)
