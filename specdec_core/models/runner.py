"""What the engine asks of whatever executes a model: tokens of many rows in, logits out.

A runner holds the tokens of some rows and what its model has computed from them. All that happens
to it is one of three things: a :class:`Batch` of tokens is appended in one forward, a row is cut,
or of what was appended last only some tokens are kept. Every runner guarantees:

- *Rows are apart.* What a forward says of a row depends on that row's tokens alone, in whatever
  company and order it is fed. Rows of one batch may be of any length and kind: the next token of a
  text, a whole draft tree, a piece of a prompt.
- *What is held was read.* `lengths[row]` tokens of a row are held. A caller that compares them
  with the row's text knows what is still to be fed, whether the row is new, was cut, or has fallen
  behind: this is all there is to prefilling, and to taking up again a text that had to leave.
- *Nothing is computed twice.* Tokens that are kept or that come before a cut are not fed again.
- *Nobody computes for no one.* A batch says whose logits are wanted, and others need not be made.
- *A forward that raises has appended nothing.*

Which device a runner's model is on, or on how many, nobody above it has to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

PREFILL_CHUNK = 512  # tokens a row of a forward without logits
_MOST_LOGITS = 64 * 2**20  # bytes of them that may be made for nobody


def compiled_chunk(vocab_size: int) -> int:
    """The same for graphs, which make logits whether or not anybody reads them."""
    return max(1, min(PREFILL_CHUNK, _MOST_LOGITS // (4 * vocab_size)))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward appends: `tokens[i]` to row `rows[i]`, at least one.

    Row i's tokens form the chain behind what the row holds, or with `parents[i]` a tree: token j
    follows token `parents[i][j]`, or what comes before the tree when that is -1, and sees only its
    ancestors. `parents[i]` may begin with tokens of the tree that earlier forwards have appended: a
    tree grows level by level. `wanted[i]` says how many of row i's last tokens logits are wanted
    of; of all, where it is not said.
    """

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int] | None] | None = None
    wanted: Sequence[int] | None = None

    @property
    def counts(self) -> list[int]:
        """How many logits are wanted of each row."""
        return list(map(len, self.tokens)) if self.wanted is None else list(self.wanted)


class Output:
    """What a forward says behind n tokens: those whose logits were wanted, row after row.

    `counts` says how many each row has. `logits` (n, vocabulary); `hidden` (n, dimension), where it
    is watched, is what the output layer read to make them.
    """

    def __init__(
        self,
        counts: Sequence[int],
        logits: Tensor,
        hidden: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> None:
        self.counts, self.logits, self.hidden = counts, logits, hidden
        if chosen is not None:
            self.chosen = chosen

    @cached_property
    def chosen(self) -> Tensor:
        """The most likely tokens (n,)."""
        # Not argmax: on a CPU in bfloat16 it takes five times as long.
        return self.logits.max(dim=-1).indices

    def of_row(self, row: int) -> Tensor:
        """The logits of one row of the batch."""
        first = sum(self.counts[:row])
        return self.logits[first : first + self.counts[row]]

    def choices(self) -> list[list[int]]:
        """The most likely tokens on the host, by row. Waits for the device."""
        flat = iter(self._on_host())
        return [list(islice(flat, count)) for count in self.counts]

    def _on_host(self) -> list[int]:
        return list(self.chosen.tolist())


def select(states: Tensor, batch: Batch) -> Tensor:
    """Of `states` (rows, width, …), which begin with the tokens of `batch`, those (n, …) that are
    wanted, row after row."""
    ends = list(map(len, batch.tokens))
    spans = [(end - count, end) for end, count in zip(ends, batch.counts, strict=True)]
    if len(set(spans)) == 1:
        first, end = spans[0]
        return states[:, first:end].flatten(0, 1)
    rows = [row for row, span in enumerate(spans) for _ in range(*span)]
    return states[rows, [place for span in spans for place in range(*span)]]


def chunks(rows: Sequence[int], tokens: Sequence[Sequence[int]], size: int) -> Iterator[Batch]:
    """Batches that append `tokens[i]` to row `rows[i]`, at most `size` each, without logits."""
    for start in range(0, max(map(len, tokens), default=0), size):
        pairs = zip(rows, tokens, strict=True)
        left = {row: own[start : start + size] for row, own in pairs if len(own) > start}
        yield Batch(list(left), list(left.values()), wanted=[0] * len(left))


class ModelRunner(ABC):
    """One model, and the tokens that it has read in each row.

    `vocab_size` is how many of a vocabulary's first tokens have logits: a draft may know more than
    its target. A row holds `max_length` tokens, and a last draft tree behind them. `seconds` is the
    time spent in forwards so far; on a GPU, in starting them.
    """

    device: torch.device  # where outputs are
    vocab_size: int
    max_length: int
    prefill_chunk = PREFILL_CHUNK

    def __init__(self) -> None:
        self.seconds = 0.0
        self.lazy = False  # a draft that reads a text only when asked what follows it

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """How many tokens each row holds."""

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Output:
        """Append a batch, and say what follows its tokens.

        Raises:
            ValueError: a row cannot hold that much.
        """
        start = perf_counter()
        output = self._forward(batch)
        self.seconds += perf_counter() - start
        return output

    def prefill(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append `tokens[i]` to row `rows[i]`, a chunk a forward; nobody asks what follows."""
        for batch in chunks(rows, tokens, self.prefill_chunk):
            self.forward(batch)

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget everything of `row` past its first `length` tokens, which it must hold."""

    @abstractmethod
    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Of the tokens of `row` from position `start` on, keep those numbered in `kept`
        (increasing) and forget the others."""

    @abstractmethod
    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Make `rows[i]` hold the first `lengths[i]` tokens of `row`, and nothing else."""

    @abstractmethod
    def watch_hidden(self, wanted: bool) -> None:
        """Whether outputs have the model's last hidden states."""

    @abstractmethod
    def expect(self, parents: Sequence[int]) -> None:
        """Be ready for a tree, numbered level by level, that forwards will feed whole, cut behind a
        level or a level at a time. Without this, one gets ready when the tree is first met."""

    def widen(self, width: int) -> None:  # noqa: B027 (a wish, which a runner may ignore)
        """Pad forwards to so many tokens a row at least. Where forwards of one token and of several
        take turns, this is worth it if graphs of their own run them: each has its own copy of the
        weights, and the processor's cache holds one sooner than both."""

    @abstractmethod
    def _forward(self, batch: Batch) -> Output: ...
