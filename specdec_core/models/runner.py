"""The interface of everything that executes a model: append tokens to rows, predict what follows.

A runner keeps, for each row, the tokens that its model was fed and the cache computed from them.
Three operations change a row: a forward appends the tokens of a :class:`Batch`, `truncate` cuts the
row, and `keep` drops some of the tokens that were appended last. Every runner guarantees:

- *Rows are independent.* A row's output depends on that row's tokens alone. A batch may mix rows of
  any kind and length: a sequence's next token, a draft tree, a chunk of a prompt.
- *A row has a length.* It holds `lengths[row]` tokens. The rest of the sequence must still be fed,
  whether the row is new, was cut or has fallen behind. Chunked prefill, and resuming a sequence
  that had left its row, need nothing else.
- *Nothing is computed twice.* Tokens that are kept are never fed again.
- *Only wanted logits are computed.* A batch names them; a runner may leave out the rest.
- *A forward that raises has appended nothing.* After :class:`CacheLost` all rows are empty.

Callers need not know the model's devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

from specdec_core.models.confidence import most_likely

PREFILL_CHUNK = 512  # tokens of a row in one forward of a prompt
NO_TOKEN = -1  # where logits are NaN or infinite, or exclude every token
_MOST_LOGITS = 64 * 2**20  # bytes of logits that a forward of a prompt may compute


class CacheLost(RuntimeError):
    """The rows of a runner on other devices are lost with a device. They are empty now, and
    everything else is unchanged."""


def logits_chunk(vocab_size: int) -> int:
    """The tokens of a row in one forward of a prompt, where the logits after all are computed."""
    return max(1, min(PREFILL_CHUNK, _MOST_LOGITS // (4 * vocab_size)))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward appends: `tokens[i]`, at least one, to row `rows[i]`.

    Args:
        rows: the rows, each once.
        tokens: what each row gets.
        parents: the trees that the tokens form; None, for a row or for all, means a chain. Token j
            of row i follows token `parents[i][j]`, or the sequence so far when that is -1,
            and sees only its ancestors. `parents[i]` may begin with tokens that earlier forwards
            have appended: a tree grows level by level.
        wanted: the number of last tokens of each row to return logits of; None: all tokens.
    """

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int] | None] | None = None
    wanted: Sequence[int] | None = None

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each row to return logits of."""
        return list(map(len, self.tokens)) if self.wanted is None else list(self.wanted)


class Output:
    """A forward's output at the n tokens with wanted logits, row after row.

    Args:
        counts: the number of tokens of each row.
        logits: (n, vocabulary).
        hidden: the input of the output layer (n, dimension), where it is watched.
        chosen: the most likely tokens (n,), where the forward has them.
        confidence: their probabilities (n,) at temperature 1, where the forward has them.
    """

    def __init__(
        self,
        counts: Sequence[int],
        logits: Tensor,
        hidden: Tensor | None = None,
        chosen: Tensor | None = None,
        confidence: Tensor | None = None,
    ) -> None:
        self.counts, self.hidden = counts, hidden
        self._logits, self._chosen, self._confidence = logits, chosen, confidence

    @property
    def logits(self) -> Tensor:
        """(n, vocabulary)."""
        return self._logits

    @cached_property
    def chosen(self) -> Tensor:
        """The most likely tokens (n,)."""
        # Not argmax: on a CPU in bfloat16 it takes five times as long.
        return self.logits.max(dim=-1).indices if self._chosen is None else self._chosen

    @cached_property
    def confidence(self) -> Tensor:
        """The probabilities (n,) of the most likely tokens at temperature 1, in float32."""
        return most_likely(self.logits)[1] if self._confidence is None else self._confidence

    def choices(self) -> list[list[int]]:
        """The most likely tokens of each row, on the host; :data:`NO_TOKEN` where the logits are no
        numbers. Waits for the device."""
        # Of numbers with a NaN among them the largest is NaN.
        largest = self.logits.gather(-1, self.chosen[:, None])[:, 0]
        checked = torch.where(largest.isfinite(), self.chosen, NO_TOKEN)
        flat = iter(checked.tolist())
        return [list(islice(flat, count)) for count in self.counts]

    def of_row(self, row: int) -> Tensor:
        """The logits (count, vocabulary) of the batch's row number `row`."""
        first = sum(self.counts[:row])
        return self.logits[first : first + self.counts[row]]


def chunks(
    rows: Sequence[int], tokens: Sequence[Sequence[int]], size: int, logits: bool = False
) -> Iterator[Batch]:
    """Batches that append `tokens[i]` to row `rows[i]`, at most `size` at a time, with all `logits`
    or none."""
    for start in range(0, max(map(len, tokens), default=0), size):
        pairs = zip(rows, tokens, strict=True)
        left = {row: text[start : start + size] for row, text in pairs if len(text) > start}
        yield Batch(list(left), list(left.values()), wanted=None if logits else [0] * len(left))


def _known(batch: Batch, known: int) -> Batch:
    """The batch with only the first `known` tokens of the vocabulary: what a draft model is fed
    does not decide the output."""
    if max(map(max, batch.tokens)) < known:
        return batch
    tokens = [[token if token < known else 0 for token in row] for row in batch.tokens]
    return replace(batch, tokens=tokens)


class ModelRunner(ABC):
    """A model and the tokens that it was fed in each row, with the guarantees of this module."""

    device: torch.device  # of outputs
    vocab_size: int  # logits of the first tokens only: a draft may have more than its target
    max_length: int  # tokens of a row; a last draft tree fits after them
    prefill_chunk = PREFILL_CHUNK
    known: int | None = None  # tokens with an embedding, where a sequence may have more
    mixes = False  # whether one forward of several rows costs less than a forward of each

    def __init__(self) -> None:
        self.seconds = 0.0  # spent in forwards so far; on a GPU, in starting them
        self.lazy = False  # whether a draft model prefills only when tokens are drafted

    @property
    def hardware(self) -> str:
        """Where its forwards run, for a reader."""
        return str(self.device)

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """How many tokens each row holds."""

    def length(self, row: int) -> int:
        """How many tokens `row` holds."""
        return self.lengths[row]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Output:
        """Append the tokens of a batch, and predict what follows them. Raises :class:`ValueError`
        where a row cannot hold that many tokens."""
        start = perf_counter()
        output = self._forward(batch if self.known is None else _known(batch, self.known))
        self.seconds += perf_counter() - start
        return output

    def prefill(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append `tokens[i]` to row `rows[i]`, in chunks, without computing logits."""
        for batch in chunks(rows, tokens, self.prefill_chunk):
            self.forward(batch)

    def predict(self, row: int, tokens: Sequence[int]) -> Iterator[Tensor]:
        """Append `tokens` to `row`, in chunks; yields the logits (n, vocabulary) after the n tokens
        of each."""
        size = min(self.prefill_chunk, logits_chunk(self.vocab_size))
        for batch in chunks([row], [tokens], size, logits=True):
            yield self.forward(batch).logits

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of `row`. Raises :class:`ValueError` where the
        row holds fewer."""

    @abstractmethod
    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Of the tokens of `row` from position `start` on, keep those with the offsets `kept`
        (increasing, from 0) and forget the rest."""

    @abstractmethod
    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Make `rows[i]` hold the first `lengths[i]` tokens of `row`, and nothing else."""

    @abstractmethod
    def watch_hidden(self, wanted: bool) -> None:
        """Make outputs have `hidden`, the model's last hidden states, or no longer."""

    @abstractmethod
    def expect(self, parents: Sequence[int]) -> None:
        """Prepare for a tree, numbered level by level, that forwards will feed whole, cut after a
        level, or a level at a time. Without this the first such forward takes longer."""

    @abstractmethod
    def _forward(self, batch: Batch) -> Output: ...


def time_forward(runner: ModelRunner, width: int, batch: int = 1) -> float:
    """Seconds of a forward of `width` tokens of the first `batch` rows until its choices are on the
    host. The rows are as they were."""
    lengths = runner.lengths[:batch]
    start = perf_counter()
    runner.forward(Batch(range(batch), [[1] * width] * batch)).choices()
    seconds = perf_counter() - start
    for row, length in enumerate(lengths):
        runner.truncate(row, length)
    return seconds
