"""The one door through which every model, its configuration and its tokenizer is loaded, by the
name that users give it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from specdec_core.base.errors import UserError
from specdec_core.models.generation_settings import read_generation_settings
from specdec_core.models.location import located
from specdec_core.models.reading import ONE_AT_A_TIME, read_model, reading


def load_config(name: str) -> PretrainedConfig:
    """A model's configuration. Raises :class:`UserError`."""
    config: PretrainedConfig = _load(AutoConfig, name, "configuration")
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer. Raises :class:`UserError`."""
    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, name, "tokenizer")
    return tokenizer


def load_weights(
    name: str, dtype: torch.dtype | str, factory: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """A model with its weights, in evaluation mode; for the arguments see :func:`read_model`.
    Raises :class:`UserError` where it is of a format that this engine does not run, or its weights
    cannot be read or do not fit its configuration."""
    check_format(load_config(name), name)
    model: PreTrainedModel = read_model(factory, located(name), name, dtype=dtype, **options)
    return model


def load_skeleton(name: str) -> PreTrainedModel:
    """A model without its weights: its configuration and generation settings. It is on the device
    `meta` and cannot be run."""
    config = load_config(name)  # may unpack weights, which is not for `meta`
    with torch.device("meta"):
        model = build(config, name)
    model.generation_config = read_generation_settings(name, located(name))
    return model


def build(config: PretrainedConfig, name: str) -> PreTrainedModel:
    """A model of that configuration with random weights, in evaluation mode. Raises
    :class:`UserError`."""
    with ONE_AT_A_TIME, reading(name, "build it from its configuration", located(name)):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        model.eval()
    return model


def check_format(config: PretrainedConfig, name: str) -> None:
    """Raises :class:`UserError` for weights in a format that this engine does not run: floats of
    eight bits or fewer, and formats of other libraries than transformers."""
    quantised = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantised, dict):
        quantised = quantised.to_dict()
    method, form = (str(quantised.get(key) or "") for key in ("quant_method", "format"))
    known = method in ("", "bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING)
    if not known or "fp" in method or form.startswith(("float", "nvfp", "mxfp")):
        raise UserError(
            f"{name}: its weights are in the format {' '.join(filter(None, (method, form)))}, which"
            " this engine does not run; serve it with vLLM or SGLang, or take the model in bfloat16"
        )


def _load(factory: Any, name: str, what: str) -> Any:
    path = located(name)
    if path.startswith((".", os.sep)) and not Path(path).is_dir():
        raise UserError(f"{name}: no such folder")
    known_as = name if Path(path).exists() else f"{name}: no such folder, and as a hub id"
    with reading(known_as, f"load its {what}", path):
        # Else transformers asks on the terminal whether it may run a checkpoint's own code.
        return factory.from_pretrained(path, trust_remote_code=False)
