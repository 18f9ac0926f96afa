"""A :class:`ModelRunner` whose model is on other devices, and the pair that has one as target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig

from cluster.placement import Placed, Placement, place
from cluster.sharded_target.shard import Call
from cluster.sharded_target.target_group import ShardLost, TargetGroup
from specdec_core.base.bundled import resolve_path
from specdec_core.config import PairSpec
from specdec_core.models.pair import Pair, check_pair, load_drafts, load_skeleton, resolve_dtypes
from specdec_core.models.runner import ModelRunner
from specdec_core.tokens.token_tree import ROOT


class ShardedRunner(ModelRunner):
    """A runner over the shards of a :class:`TargetGroup`: tokens go there, choices come back.

    Logits are fetched when they are first looked at, and come with the choices from then on:
    greedy decoding never looks. :meth:`start` and :meth:`finish` are a forward in two halves,
    between which the caller is free to do other things. A shard that is lost costs time only: the
    group is built again, rows get their tokens back, and what was asked is asked again.
    """

    def __init__(self, group: TargetGroup, slots: int, vocab_size: int, device: str) -> None:
        self.group, self.slots = group, slots
        self.vocab_size, self.max_length = vocab_size, group.spec.runner.max_length
        self.device = torch.device(device)  # where logits are wanted
        self.seconds, self.lazy = 0.0, False
        self.hidden: Tensor | None = None
        self._lengths = [0] * slots  # as the caller sees them
        self._queue: list[
            tuple[str, Any]
        ] = []  # what the shards will be told with the next forward
        self._rows = [_Row() for _ in range(slots)]  # what the shards hold, …
        self._before = [0] * slots  # … and how much of it they held before the last of
        self._last: tuple[str, tuple[Any, ...]] | None = None  # what appended to it
        self._forwards, self._eager = 0, False
        self._answer: Any = None
        self._watched = False
        self._expected: list[tuple[int, ...]] = []
        self._number = group.add(self)
        self._queue.append(("open", (slots,)))

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    def watch_hidden(self, wanted: bool) -> None:
        if wanted != self._watched:
            self._watched = wanted
            self._queue.append(("watch_hidden", (wanted,)))
            self.hidden = None

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

    def prefill(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        began = perf_counter()
        self._submit("prefill", rows, tokens, None)
        self._collect()
        self.seconds += perf_counter() - began

    def forward(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        self.start(rows, tokens, parents)
        return self.finish()

    def start(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Send a forward off."""
        began = perf_counter()
        self._submit("forward", rows, tokens, parents)
        self.seconds += perf_counter() - began

    def finish(self) -> Tensor:
        """Wait for the forward that was started; returns its logits."""
        began = perf_counter()
        self._chosen, logits, hidden = self._collect()
        self.hidden = None if hidden is None else hidden.tensor(self.device)
        self._forwards += 1
        if logits is not None:
            self._logits = logits.tensor(self.device)
        else:
            shape = (len(self._chosen), len(self._chosen[0]), self.vocab_size)
            number = self._forwards
            lazy = LazyTensor(lambda: self._fetch_logits(number), shape)
            self._logits = cast(Tensor, lazy)  # torch's functions take it for one
        self.seconds += perf_counter() - began
        return self._logits

    @property
    def chosen(self) -> Tensor:
        return torch.tensor(self._chosen, device=self.device)

    def choices(self) -> list[list[int]]:
        return [list(own) for own in self._chosen]

    def _submit(
        self,
        name: str,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None,
    ) -> None:
        """Send what has queued up, and what appends `tokens` to the rows."""
        rows, tokens = list(rows), [list(own) for own in tokens]
        calls = self._flush()
        self._before = [len(row.tokens) for row in self._rows]
        for n, (row, own) in enumerate(zip(rows, tokens, strict=True)):
            self._rows[row].append(own, None if parents is None else parents[n])
            self._lengths[row] += len(own)
        more = (parents, self._eager) if name == "forward" else ()
        self._last = name, (rows, tokens, *more)
        self.group.submit([*calls, self._call(*self._last)])

    def _collect(self) -> Any:
        try:
            return self.group.collect()
        except ShardLost:
            self.group.rebuild()
            return self._answer  # of the same, asked again to restore the rows
        except Exception:
            # As after a forward that fails here: nothing was appended.
            for row, length in zip(self._rows, self._before, strict=True):
                row.truncate(length)
            self._lengths, self._last = list(self._before), None
            raise

    def _fetch_logits(self, number: int) -> Tensor:
        if number != self._forwards:
            raise RuntimeError("these logits are of an earlier forward, and gone")
        self._eager = True
        while True:
            try:
                return self.group.ask([self._call("logits", ())]).tensor(self.device)
            except ShardLost:
                self.group.rebuild()

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Call:
        return self._number, name, arguments

    def _flush(self) -> list[Call]:
        """What has queued up, as calls; the rows are taken to be as these will make them."""
        calls = [self._call(name, arguments) for name, arguments in self._queue]
        for name, arguments in self._queue:
            if name == "truncate":
                row, length = arguments
                self._rows[row].truncate(length)
            elif name == "keep":
                row, start, kept = arguments
                self._rows[row].keep(start, kept)
        self._queue.clear()
        return calls

    def restore(self) -> None:
        """Have new shards hold what the lost ones held, by computing it again. What has queued up
        since is not lost. Raises :class:`ShardLost`."""
        if self._queue and self._queue[0][0] == "open":
            return
        calls: list[tuple[str, tuple[Any, ...]]]
        calls = [("open", (self.slots,)), ("watch_hidden", (self._watched,))]
        calls += [("expect", (shape,)) for shape in self._expected]
        texts, trees = {}, {}
        for number, (row, length) in enumerate(zip(self._rows, self._before, strict=True)):
            texts[number], tree, parents = row.parts(length)
            if tree:
                trees[number] = tree, parents
        texts = {number: text for number, text in texts.items() if text}
        if texts:
            calls.append(("prefill", (list(texts), list(texts.values()))))
        for number, (tree, parents) in trees.items():
            calls.append(("forward", ([number], [tree], [parents], False)))
        if self._last is not None:
            calls.append(self._last)
        self._answer = self.group.ask([self._call(*call) for call in calls])


class _Row:
    """The tokens that a row of the cache holds, and for each the place of its parent, which in a
    text is the place before."""

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

    def keep(self, start: int, kept: Sequence[int]) -> None:
        places = {start + node: start + n for n, node in enumerate(kept)}
        self.tokens[start:] = [self.tokens[place] for place in places]
        parents = [self.parents[place] for place in places]
        self.parents[start:] = [places.get(parent, parent) for parent in parents]

    def parts(self, length: int) -> tuple[list[int], list[int], list[int]]:
        """Of the first `length` tokens those that are a text, those that are a tree behind it, and
        the tree's parents."""
        forks = [parent for place, parent in enumerate(self.parents[:length]) if parent < place - 1]
        start = min(forks, default=length - 1) + 1
        parents = [max(parent - start, ROOT) for parent in self.parents[start:length]]
        return self.tokens[:start], self.tokens[start:length], parents


class LazyTensor:
    """A tensor of known shape that is fetched when something else than its shape is asked for."""

    def __init__(self, fetch: Callable[[], Tensor], shape: Sequence[int]) -> None:
        self._fetch, self.shape = fetch, torch.Size(shape)

    @cached_property
    def value(self) -> Tensor:
        return self._fetch()

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int) and len(self.shape) > 1:
            return LazyTensor(lambda: self.value[item], self.shape[1:])
        return self.value[item]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def fetched(value: Any) -> Any:
            if isinstance(value, LazyTensor):
                return value.value
            return type(value)(map(fetched, value)) if isinstance(value, list | tuple) else value

        return function(*fetched(args), **{k: fetched(v) for k, v in (kwargs or {}).items()})


@dataclass
class ShardedPair(Pair):
    """A pair whose target is on the devices of a group; `target` has its configuration only."""

    group: TargetGroup = field(init=False)

    def open_runner(self, draft: str | None, slots: int) -> ModelRunner:
        if draft is not None:
            return super().open_runner(draft, slots)
        size = self.target.config.get_text_config(decoder=True).vocab_size
        return ShardedRunner(self.group, slots, size, self.spec.runner.device)


@contextmanager
def sharded_pair(spec: PairSpec, placement: Placement) -> Iterator[ShardedPair]:
    """The pair with its drafts here and its target on devices placed for it on the connected
    cluster, which are given back at the end.

    Raises:
        UserError: the pair, the placement or both together are wrong.
    """
    placed = place(placement)
    try:
        pair = load_sharded(spec, placed)
        try:
            yield pair
        finally:
            pair.group.close()
    finally:
        placed.remove()


def load_sharded(spec: PairSpec, placed: Placed, drafts: bool = True) -> ShardedPair:
    """The pair with its target on the devices of `placed` and its `drafts` in this process, or
    nowhere but for their configurations."""
    torch.set_num_threads(spec.runner.threads)
    tokenizer = check_pair(spec)
    if placed.kind == "GPU" and spec.runner.target_dtype == "auto":
        # The checkpoint's own, wherever the drafts are.
        dtype = AutoConfig.from_pretrained(resolve_path(spec.target)).dtype or torch.float32
        runner = spec.runner.model_copy(update={"target_dtype": str(dtype).removeprefix("torch.")})
        spec = spec.model_copy(update={"runner": runner})
    spec = resolve_dtypes(spec)
    own = load_drafts(spec) if drafts else {n: load_skeleton(m) for n, m in spec.drafts.items()}
    pair = ShardedPair(spec, tokenizer, load_skeleton(spec.target), own)
    runner = spec.runner.model_copy(update={"max_length": pair.max_length})
    pair.group = TargetGroup(placed, spec.model_copy(update={"runner": runner}))
    return pair
