"""A head as vLLM reads it, whatever format it was had in: made once, then kept."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.base.files import alone
from specdec_core.base.workspace import kept_folder
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.loading import load_head, read_card, save_head


def exported_head(
    name: str, fingerprint: str, target_config: PretrainedConfig, dtype: torch.dtype
) -> Path:
    """The folder of a head, whose weights have this `fingerprint`, in the format of *speculators*
    and this data type.

    Raises:
        UserError: vLLM has no place for it.
    """
    folder = kept_folder("heads") / f"{fingerprint}-{str(dtype).removeprefix('torch.')}"
    if not folder.is_dir():
        head = load_head(name, target_config, dtype=dtype)
        if not isinstance(head, EagleHead):
            raise UserError(f"{name}: an EAGLE-1 head, which is compared with no other program")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            save_head(head, folder, read_card(name), dtype=dtype)
    return folder
