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
from cluster.sharded_target.micro_batches import PIPELINED_FROM, micro_batches
from cluster.sharded_target.target_group import ShardLost, TargetGroup
from specdec_core.models.runner import Batch, CacheLost, ModelRunner, Output, chunks


class ShardedRunner(ModelRunner):
    """A runner over the shards of a :class:`TargetGroup`: of the target, or of the `draft` of that
    name in the shard that answers, with rows of `max_length` tokens.

    Logits are fetched when they are first read, and sent along with every later forward: greedy
    decoding reads none. Where layers are split, forwards of at least `pipelined_from` tokens are
    pipelined (:mod:`cluster.sharded_target.micro_batches`). If a shard is lost, the group is
    restarted, and the call that notices it raises :class:`CacheLost`: the rows are empty, and
    everything else continues. A runner with empty rows has lost nothing and raises none when the
    group was restarted. For `cache_tokens` see :meth:`Pair.open_runner`.
    """

    device = torch.device("cpu")  # this process has no other

    def __init__(
        self,
        group: TargetGroup,
        slots: int,
        vocab_size: int,
        cache_tokens: int | None = None,
        draft: str | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        runner = group.spec.runner
        self.group, self.slots = group, slots
        self.vocab_size, self.max_length = vocab_size, max_length or runner.max_length
        # Ranks that each have all layers run a forward together.
        self._stages = group.parts if group.split == "layers" else 1
        self.pipelined_from = PIPELINED_FROM[group.placed.kind]
        self._opening = slots, cache_tokens, draft, max_length
        self._watched = False
        self._expected: list[tuple[int, ...]] = []
        self._forwards, self._eager = 0, False
        self._mixes: bool | None = None
        self._number = group.add(self)
        self._open()

    def _open(self) -> None:
        """Have the shards make empty rows before the next call."""
        self._group_start = self.group.rebuilt
        self._lengths = [0] * self.slots
        # Calls that are sent with the next forward.
        self._queue: list[Call] = []
        self._later("open", *self._opening)
        if self._watched:
            self._later("watch_hidden", True)
        for shape in self._expected:
            self._later("expect", shape)

    @property
    def hardware(self) -> str:
        kind = "cuda" if self.group.placed.kind == "GPU" else "cpu"
        return kind if self.group.parts == 1 else f"{kind} × {self.group.parts}"

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        if self._mixes is None:
            self._mixes = bool(self._ask("mixes"))
        return self._mixes

    def watch_hidden(self, watch: bool) -> None:
        if watch != self._watched:
            self._watched = watch
            self._later("watch_hidden", watch)

    def expect(self, parents: Sequence[int]) -> None:
        shape = tuple(parents)
        if shape not in self._expected:
            self._expected.append(shape)
            self._later("expect", shape)

    def truncate(self, row: int, length: int) -> None:
        if length > self._lengths[row]:
            raise ValueError(f"row {row} holds {self._lengths[row]} tokens, cannot keep {length}")
        if length < self._lengths[row]:
            self._lengths[row] = length
            self._later("truncate", row, length)

    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        self._lengths[row] = start + len(kept)
        self._later("keep", row, start, tuple(kept))

    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for other, length in zip(rows, lengths, strict=True):
            self._lengths[other] = length
        self._later("fork", row, tuple(rows), tuple(lengths))

    def prefill(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        # All chunks at once: a shard starts the next chunk before other shards end the last one.
        began = perf_counter()
        if batches := list(chunks(rows, tokens, self.prefill_chunk)):
            self._feed("prefill", batches)
        self.seconds += perf_counter() - began

    def _forward(self, batch: Batch) -> Output:
        batches = [batch]
        if sum(map(len, batch.tokens)) >= self.pipelined_from:
            batches = micro_batches(batch, self._stages)
        chosen, logits, hidden = self._feed("forward", batches, self._eager)
        number = self._forwards
        return _Output(
            batch.counts,
            chosen,
            lambda: self._fetch_logits(number) if logits is None else logits,
            hidden,
        )

    def _feed(self, name: str, batches: Sequence[Batch], *options: bool) -> Any:
        """The answer to the call `name`, which feeds `batches`."""
        if self._group_start != self.group.rebuilt and not any(self._lengths):
            self._open()  # it has lost nothing
        before = list(self._lengths)
        self._forwards += 1
        try:
            answer = self._ask(name, batches, *options)
        except CacheLost:
            raise
        except Exception:
            # Some shards may have appended some of it.
            for row in {row for batch in batches for row in batch.rows}:
                self._later("truncate", row, before[row])
            raise
        for batch in batches:
            for row, tokens in zip(batch.rows, batch.tokens, strict=True):
                self._lengths[row] += len(tokens)
        return answer

    def _fetch_logits(self, number: int) -> Tensor:
        if number != self._forwards:
            raise RuntimeError("these logits are of an earlier forward, and gone")
        self._eager = True
        return cast(Tensor, self._ask("logits"))

    def _later(self, name: str, *arguments: Any) -> None:
        self._queue.append((self._number, name, arguments))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Send the queued calls and this one; its answer. Raises :class:`CacheLost`."""
        self._later(name, *arguments)
        queued, self._queue = self._queue, []
        try:
            if self._group_start != self.group.rebuilt:
                raise ShardLost
            return self.group.ask(queued)
        except ShardLost:
            if self._group_start == self.group.rebuilt:
                self.group.rebuild()
            self._open()
            raise CacheLost("a process of the models was lost") from None


class _Output(Output):
    """The answer to a forward; logits are fetched when they are first read."""

    def __init__(
        self,
        counts: Sequence[int],
        tokens: list[int],
        fetch: Callable[[], Tensor],
        hidden: Tensor | None,
    ) -> None:
        # A row that is broken has no choice; as a token it has the number 0 here.
        chosen = torch.tensor(tokens).clamp_(min=0)
        super().__init__(counts, torch.empty(0), hidden, chosen)
        self._tokens, self._fetch = tokens, fetch

    @cached_property
    def logits(self) -> Tensor:
        return self._fetch()

    def choices(self) -> list[list[int]]:
        flat = iter(self._tokens)
        return [list(islice(flat, count)) for count in self.counts]
