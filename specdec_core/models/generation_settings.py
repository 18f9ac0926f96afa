"""A checkpoint's settings for decoding, in its `generation_config.json`.

Only its end-of-text tokens apply. Temperature, top-k and top-p are set by `Sampling`. The rest is
not supported, and comparisons with peers leave it out, too.
"""

from __future__ import annotations

import logging
import reprlib
from functools import cache
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from specdec_core.models.reading import reading

log = logging.getLogger(__name__)

# Settings of transformers that decide which tokens are written, with the value that changes nothing
# (None does so for each).
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
    "watermarking_config": None,
}


def read_generation_settings(name: str, path: str) -> GenerationConfig:
    """The settings of the checkpoint at a folder or hub id, as its model would load them. Raises
    :class:`UserError`, which calls the model `name`."""
    with reading(name, "load its generation settings", path):
        try:
            return GenerationConfig.from_pretrained(path)
        except OSError:  # without the file, the configuration has them
            if (Path(path) / "generation_config.json").exists():
                raise
            return GenerationConfig.from_pretrained(
                path, config_file_name="config.json", _from_model_config=True
            )


@cache
def warn_of_unsupported(name: str, path: str) -> None:
    """Warn in one line, once for each model, of unsupported settings of its checkpoint at
    `path`."""
    settings = read_generation_settings(name, path)
    given = {key: getattr(settings, key, None) for key in NEUTRAL}
    unsupported = ", ".join(
        f"{key} {reprlib.repr(value)}"
        for key, value in given.items()
        if value not in (None, [], NEUTRAL[key])
    )
    if unsupported:
        log.warning(
            "%s: its generation_config asks for %s, which is not supported and left out",
            name,
            unsupported,
        )
