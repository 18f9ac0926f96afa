"""Forwards that are pipelined through a target split by layers.

Each rank, a stage, waits for the hidden states of the stage before it. So a forward of several rows
is fed as micro-batches of some rows each, in one message: while a stage runs one of them, the stage
before it runs the next one. A row's output does not depend on its batch.
"""

from __future__ import annotations

from specdec_core.models.runner import Batch

# A stage reads its weights for each micro-batch. If a stage takes a + b · tokens, two stages take
# 2 (a + b n) for one batch of n tokens, and 3 (a + b n / 2) for two micro-batches, which is less if
# n > 2 a / b. On two CPU cores the bundled target, compiled, takes 1.04 times as long pipelined at
# 64 tokens, 0.88 to 0.93 at 128, 0.80 to 0.88 from 256 on (`python -m research.split_forwards`).
# A GPU computes some 300 tokens while it reads the weights: n > 600.
PIPELINED_FROM = {"CPU": 128, "GPU": 600}  # tokens of a forward, by the kind of devices


def micro_batches(batch: Batch, stages: int) -> list[Batch]:
    """The rows of `batch`, in order, as at most `stages` batches of about as many tokens each."""
    total, before = sum(map(len, batch.tokens)), 0.0
    groups: list[list[int]] = [[] for _ in range(stages)]
    for number, tokens in enumerate(batch.tokens):
        middle = before + len(tokens) / 2
        groups[int(middle * stages / total)].append(number)
        before += len(tokens)
    return [_part(batch, rows) for rows in groups if rows]


def _part(batch: Batch, numbers: list[int]) -> Batch:
    """The batch's rows with these numbers."""
    first, last = numbers[0], numbers[-1] + 1
    return Batch(
        batch.rows[first:last],
        batch.tokens[first:last],
        None if batch.parents is None else batch.parents[first:last],
        None if batch.wanted is None else batch.wanted[first:last],
    )
