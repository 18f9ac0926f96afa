"""vLLM's sampling with speculation on a CPU, repaired.

In the CPU build of 0.32 the function that copies a request's temperature to each of its tokens
writes into a temporary tensor, so speculation draws at wrong temperatures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, tensor

if TYPE_CHECKING:
    from logging import Logger

NAME = "specdec"  # in vLLM's log


def repair() -> None:
    """In a process of vLLM: have vLLM's function checked at its first use, and replaced where it is
    wrong."""
    from vllm.logger import init_logger
    from vllm.v1.sample import rejection_sampler

    if not isinstance(rejection_sampler.expand_batch_to_tokens, Spreading):
        own, logger = rejection_sampler.expand_batch_to_tokens, init_logger(f"vllm.{NAME}")
        rejection_sampler.expand_batch_to_tokens = Spreading(own, logger)


def repaired() -> bool:
    """Whether vLLM's function is wrong and replaced in this process, a worker of vLLM."""
    from vllm.v1.sample import rejection_sampler

    spreading = rejection_sampler.expand_batch_to_tokens
    return isinstance(spreading, Spreading) and spreading.chosen is expanded


class Spreading:
    """vLLM's own function where it is right, else ours. The choice is made and logged at the first
    call, because vLLM's function needs a running worker."""

    def __init__(self, own: Callable[..., Tensor], logger: Logger) -> None:
        self._own, self._logger = own, logger

    def __call__(self, *args: int | Tensor, **options: int) -> Tensor:
        return self.chosen(*args, **options)

    @cached_property
    def chosen(self) -> Callable[..., Tensor]:
        right = spreads(self._own)
        found = (
            "spreads temperatures over candidates rightly; nothing to repair"
            if right
            else "draws at wrong temperatures when it speculates (expand_batch_to_tokens); repaired"
        )
        self._logger.info("%s: this vLLM %s", NAME, found)
        return self._own if right else expanded


def spreads(spread: Callable[..., Tensor]) -> bool:
    """Whether a function does what :func:`expanded` does. It is tried with two values: memory that
    it does not write may hold one of them by chance."""
    for value in (0.625, 3.5):
        asked = tensor([value, 0.0]), tensor([1, 3])
        if spread(*asked, 3, replace_from=0, replace_to=1).tolist() != [value, 1.0, 1.0]:
            return False
    return True


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each value of `x` for each of its request's tokens, (num_tokens,), with another in the place
    of `replace_from`; `cu_num_tokens` are the requests' tokens, summed up."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
