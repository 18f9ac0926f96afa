"""vLLM's sampling with speculation on a CPU, repaired.

In the CPU build of 0.32 a request's temperature does not reach its tokens: what spreads it writes
into a copy, so that speculation draws at temperatures that were never set.
"""

from __future__ import annotations

from torch import Tensor


def repair() -> None:
    """Repair it in this process, which must be one of vLLM's."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each value of `x` for each of its request's tokens, (num_tokens,), with another in the place
    of `replace_from`; `cu_num_tokens` are the requests' tokens, summed up."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
