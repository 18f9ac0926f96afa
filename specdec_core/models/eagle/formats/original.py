"""Heads of EAGLE's authors (SafeAILab/EAGLE), of all three generations."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.config import parse
from specdec_core.models.eagle.formats import specforge
from specdec_core.models.eagle.formats.llama import shape_values
from specdec_core.models.eagle.head import AnyHead, EagleOneHead
from specdec_core.models.eagle.settings import EagleSettings
from specdec_core.models.weight_files import read_tensors

# The authors' code gives heads for these kinds of target models Llama's decoder layer.
_AS_LLAMA = ("mistral", "mixtral", "qwen2")


def recognises(config: dict[str, Any], folder: Path) -> bool:
    """EAGLE-3 by a draft vocabulary. The configuration of EAGLE and EAGLE-2 is that of a model with
    one layer, which has no `fc`."""
    if "draft_vocab_size" in config:
        return True
    if config.get("num_hidden_layers") == 1:
        with suppress(UserError):  # whatever cannot be read
            return bool(read_tensors(folder, str(folder), lambda key: key == "fc.weight"))
    return False


def build(config: dict[str, Any], layers: int, name: str) -> AnyHead:
    """The head of that shape, without its weights."""
    if "draft_vocab_size" in config:
        return specforge.build(config, layers, name)
    # Its own attention knows `qkv_bias` alone, and heads that divide the width.
    layer, kind = {**config, **specforge.NO_BIAS, "head_dim": None}, config.get("model_type")
    if kind in _AS_LLAMA:
        layer["model_type"] = "llama"
    shape = shape_values(layer, {}, name)
    return EagleOneHead(
        parse(EagleSettings, {**shape, "feature_layers": (layers,)}, name),
        fc_bias=bool(config.get("bias", True)),
        qkv_bias=bool(config.get("qkv_bias", kind == "qwen2")),
    )


renamed = specforge.renamed
