"""Forwards of a model on other devices: tokens are sent, the most likely tokens come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from cluster.sharded_target.messages import Call
from cluster.sharded_target.target_group import ShardLost, TargetGroup
from specdec_core.models.runner import (
    PREFILL_CHUNK,
    Batch,
    ModelRunner,
    Output,
    chunks,
    logits_chunk,
)
from specdec_core.tokens.token_tree import ROOT


class ShardedRunner(ModelRunner):
    """A runner over the shards of a :class:`TargetGroup`.

    Logits are fetched when they are first read, and sent along with every later forward: greedy
    decoding reads none. A lost shard costs only time: the group is restarted, rows get their tokens
    back, and the last call is made again. For `cache_tokens` see :meth:`Pair.open_runner`.
    """

    def __init__(
        self,
        group: TargetGroup,
        slots: int,
        vocab_size: int,
        device: str,
        cache_tokens: int | None = None,
    ) -> None:
        super().__init__()
        runner = group.spec.runner
        self.group, self.slots = group, slots
        self.vocab_size, self.max_length = vocab_size, runner.max_length
        self.prefill_chunk = logits_chunk(vocab_size) if runner.compile else PREFILL_CHUNK
        self.device = torch.device(device)  # of the outputs
        self._lengths = [0] * slots  # as the caller sees them
        self._opening = "open", (slots, cache_tokens)
        # Calls that are sent with the next forward.
        self._queue: list[tuple[str, tuple[Any, ...]]] = [self._opening]
        self._rows = [_Row() for _ in range(slots)]  # what the shards hold, …
        self._before = [0] * slots  # … how much of it before the last forward, …
        self._last: list[Batch] = []  # … and what that appended
        self._forwards, self._eager = 0, False
        self._answer: Any = None
        self._watched = False
        self._expected: list[tuple[int, ...]] = []
        self._mixes: bool | None = None
        self._number = group.add(self)

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        if self._mixes is None:
            # Other queued calls wait for the next forward: shards are restored to the last one.
            opening = bool(self._queue) and self._queue[0][0] == "open"
            calls = self._flush() if opening else []
            while self._mixes is None:
                try:
                    self._mixes = bool(self.group.ask([*calls, self._call("mixes", ())]))
                except ShardLost:
                    self.group.rebuild()
                    calls = []  # it was opened again
        return self._mixes

    def watch_hidden(self, watch: bool) -> None:
        if watch != self._watched:
            self._watched = watch
            self._queue.append(("watch_hidden", (watch,)))

    def expect(self, parents: Sequence[int]) -> None:
        shape = tuple(parents)
        if shape not in self._expected:
            self._expected.append(shape)
            self._queue.append(("expect", (shape,)))

    def truncate(self, row: int, length: int) -> None:
        if length > self._lengths[row]:
            raise ValueError(f"row {row} holds {self._lengths[row]} tokens, cannot keep {length}")
        if length < self._lengths[row]:
            self._lengths[row] = length
            self._queue.append(("truncate", (row, length)))

    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        self._lengths[row] = start + len(kept)
        self._queue.append(("keep", (row, start, tuple(kept))))

    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for other, length in zip(rows, lengths, strict=True):
            self._lengths[other] = length
        self._queue.append(("fork", (row, tuple(rows), tuple(lengths))))

    def prefill(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        # All chunks at once: a shard starts the next chunk before other shards end the last one.
        began = perf_counter()
        if batches := list(chunks(rows, tokens, self.prefill_chunk)):
            self._ask(batches)
        self.seconds += perf_counter() - began

    def _forward(self, batch: Batch) -> Output:
        chosen, logits, hidden = self._ask([batch])
        number = self._forwards
        return _Output(
            batch.counts,
            chosen,
            lambda: (self._fetch_logits(number) if logits is None else logits).to(self.device),
            None if hidden is None else hidden.to(self.device),
            self.device,
        )

    def _ask(self, batches: list[Batch]) -> Any:
        """Send the queued calls and `batches`; the answer to the last batch."""
        calls = self._flush()
        self._before = [len(row.tokens) for row in self._rows]
        for batch in batches:
            for n, (number, tokens) in enumerate(zip(batch.rows, batch.tokens, strict=True)):
                parents = None if batch.parents is None else batch.parents[n]
                self._rows[number].append(tokens, parents)
                self._lengths[number] += len(tokens)
        self._last = batches
        self._forwards += 1
        try:
            return self.group.ask([*calls, *self._calls(batches)])
        except ShardLost:
            self.group.rebuild()
            return self._answer  # the same batches were fed again to restore the rows
        except Exception:
            # Some shards may have appended some of it.
            for n, (row, length) in enumerate(zip(self._rows, self._before, strict=True)):
                if length < len(row.tokens):
                    row.truncate(length)
                    self._queue.append(("truncate", (n, length)))
            self._lengths, self._last = list(self._before), []
            raise

    def _fetch_logits(self, number: int) -> Tensor:
        if number != self._forwards:
            raise RuntimeError("these logits are of an earlier forward, and gone")
        self._eager = True
        while True:
            try:
                return cast(Tensor, self.group.ask([self._call("logits", ())]))
            except ShardLost:
                self.group.rebuild()

    def _calls(self, batches: Sequence[Batch]) -> list[Call]:
        return [self._call("forward", (batch, self._eager)) for batch in batches]

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Call:
        return self._number, name, arguments

    def _flush(self) -> list[Call]:
        """The queued calls; applies them to `_rows`, as the shards will."""
        calls = [self._call(name, arguments) for name, arguments in self._queue]
        for name, arguments in self._queue:
            if name == "truncate":
                row, length = arguments
                self._rows[row].truncate(length)
            elif name == "keep":
                row, start, kept = arguments
                self._rows[row].keep(start, kept)
            elif name == "fork":
                row, others, lengths = arguments
                for other, length in zip(others, lengths, strict=True):
                    self._rows[other] = self._rows[row].part(length)
        self._queue.clear()
        return calls

    def restore(self) -> None:
        """Fill new shards with the rows of the lost ones, by computing them again. Calls that were
        queued since stay queued. Raises :class:`ShardLost`."""
        if self._queue and self._queue[0][0] == "open":
            return
        calls: list[tuple[str, tuple[Any, ...]]]
        calls = [self._opening, ("watch_hidden", (self._watched,))]
        calls += [("expect", (shape,)) for shape in self._expected]
        held = [row.parts(length) for row, length in zip(self._rows, self._before, strict=True)]
        texts = [text for text, _, _ in held]
        batches = list(chunks(range(self.slots), texts, self.prefill_chunk))
        trees = [(n, tree, parents) for n, (_, tree, parents) in enumerate(held) if tree]
        batches += [Batch([n], [tree], [parents], [0]) for n, tree, parents in trees]
        forwards = self._calls([*batches, *self._last])
        self._answer = self.group.ask([*(self._call(*call) for call in calls), *forwards])


class _Output(Output):
    """The answer to a forward; logits are fetched when they are first read."""

    def __init__(
        self,
        counts: Sequence[int],
        tokens: list[int],
        fetch: Callable[[], Tensor],
        hidden: Tensor | None,
        device: torch.device,
    ) -> None:
        super().__init__(counts, torch.empty(0), hidden)
        self._tokens, self._fetch, self._device = tokens, fetch, device

    @cached_property
    def logits(self) -> Tensor:
        return self._fetch()

    @cached_property
    def chosen(self) -> Tensor:
        return torch.tensor(self._tokens, device=self._device)

    def choices(self) -> list[list[int]]:
        flat = iter(self._tokens)
        return [list(islice(flat, count)) for count in self.counts]


class _Row:
    """The tokens of a row of the cache, and the place of each token's parent; in a sequence that is
    the place before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def append(self, tokens: Sequence[int], parents: Sequence[int] | None) -> None:
        start = len(self.tokens)
        self.tokens += tokens
        if parents is None:
            self.parents += range(start - 1, start - 1 + len(tokens))
        else:
            # `parents` may begin with nodes that are held already.
            root = start + len(tokens) - len(parents)
            self.parents += [root + parent for parent in parents[len(parents) - len(tokens) :]]

    def truncate(self, length: int) -> None:
        del self.tokens[length:], self.parents[length:]

    def part(self, length: int) -> _Row:
        """A row with the first `length` tokens of this one."""
        part = _Row()
        part.tokens, part.parents = self.tokens[:length], self.parents[:length]
        return part

    def keep(self, start: int, kept: Sequence[int]) -> None:
        places = {start + node: start + n for n, node in enumerate(kept)}
        self.tokens[start:] = [self.tokens[place] for place in places]
        parents = [self.parents[place] for place in places]
        self.parents[start:] = [places.get(parent, parent) for parent in parents]

    def parts(self, length: int) -> tuple[list[int], list[int], list[int]]:
        """The first `length` tokens as a sequence, the tokens of a tree after it, and the tree's
        parents."""
        forks = [parent for place, parent in enumerate(self.parents[:length]) if parent < place - 1]
        start = min(forks, default=length - 1) + 1
        parents = [max(parent - start, ROOT) for parent in self.parents[start:length]]
        return self.tokens[:start], self.tokens[start:length], parents
