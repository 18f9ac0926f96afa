"""What a head and its target must agree in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
    check_layers(settings.feature_layers, last, f"{name}: reads the layers")


def check_layers(layers: Sequence[int], last: int, what: str) -> None:
    """Raises :class:`UserError`, which begins with `what` they are, unless the layers that a head
    reads are increasing numbers from 0 to `last`."""
    increasing = all(a < b for a, b in pairwise(layers))
    if not increasing or layers[0] < 0 or layers[-1] > last:
        raise UserError(f"{what} {list(layers)}, expected increasing numbers from 0 to {last}")
