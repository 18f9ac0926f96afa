"""An EAGLE head as a draft model, for every drafter.

A token is fed with the state before it: the target's features where the target was fed the token
before, the head's own state where that token was drafted. A round later the target has features of
the tokens that it accepted. So the head's next forward feeds these tokens again, with features, as
in EAGLE. A drafted token needs the head's state after the one before: several drafted tokens are
fed one after the other."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec_core.models import draft_vocabulary
from specdec_core.models.attention import ATTENTION
from specdec_core.models.cache import PooledCache, SlotCache, SlotLayer
from specdec_core.models.eager import TREE_ROOM
from specdec_core.models.eagle import AnyHead
from specdec_core.models.eagle import head as eagle_head
from specdec_core.models.eagle.feed import RowFeed, Span
from specdec_core.models.eagle.settings import EagleSettings
from specdec_core.models.eagle.step import EagleStep, example
from specdec_core.models.row_attention import operator
from specdec_core.models.row_attention.plans import MaskedSpans, SeenPlaces
from specdec_core.models.row_attention.sequence import PackedSequence
from specdec_core.models.runner import Batch, ModelRunner, Output
from specdec_core.tokens.topology import Topologies


@runtime_checkable
class ReadRows(Protocol):
    """The tokens that a target was fed in each row, and its features of them."""

    feature_layers: tuple[int, ...]  # in the order in which features have them
    vocab_size: int

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that each row holds."""

    def features(self, rows: Sequence[int], places: Sequence[int]) -> Tensor:
        """The features of the tokens at `places[i]` of `rows[i]`, (n, layers · width)."""


class EagleRunner(ModelRunner):
    """`head` over the features that the runner `target` keeps; both have the same rows. With
    `weights`, the digest of all weights that the head uses, it is compiled; where that fails, it
    runs eagerly after one warning. For a `pooled` cache and `cache_tokens` see
    :class:`~specdec_core.models.eager.EagerRunner`.

    The first token of a sequence has no features before it and is not fed: after it, all tokens are
    equally likely. The first `settled` tokens of a row were fed with the target's features.
    """

    mixes = True

    def __init__(
        self,
        head: AnyHead,
        target: ReadRows,
        slots: int,
        max_length: int,
        weights: str | None = None,
        pooled: bool | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.head, self.target, self.max_length = head, target, max_length
        self.head.config._attn_implementation = ATTENTION
        weight = next(head.layers.parameters())
        self.device, self.vocab_size = weight.device, target.vocab_size
        self._columns = _columns(head.settings, target.feature_layers)
        on_cpu = self.device.type == "cpu"
        half = on_cpu and weight.dtype == torch.float16  # which its operator does not have
        self._compact = operator.available(self.device) and not half
        settings, positions = head.settings, max_length + TREE_ROOM
        dtype = weight.dtype if self._compact else torch.float32
        pooled = self._compact and not on_cpu if pooled is None else pooled
        size, pool = (1, slots, positions), (self.device, dtype, cache_tokens)
        self.cache = PooledCache(*size, *pool) if pooled else SlotCache(*size, dtype)
        like = weight.new_empty((1, settings.num_key_value_heads, 1, settings.head_dim))
        (layer,) = self.cache.layers
        assert isinstance(layer, SlotLayer)
        layer.lazy_initialization(like, like)
        # The head's state after each token.
        self.cache.keep_features(settings.hidden_size, weight[:0])
        features = len(settings.feature_layers) * settings.target_hidden_size
        places = torch.zeros(0, dtype=torch.long, device=self.device)
        self._nothing = weight.new_zeros((0, features)), places
        self._begun = [False] * slots  # whether a row holds its first token
        self._settled = [0] * slots
        self._topologies = Topologies(dtype, self.device)
        self._step = EagleStep(head)
        self._graph: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        self._watched = False
        if weights is not None and self._compact and on_cpu and not pooled:
            self._graph = self._compiled(weights)

    def _compiled(self, weights: str) -> Callable[[list[Tensor]], Sequence[Tensor]] | None:
        """The graph of a step; None, after a warning, where it cannot be compiled."""
        from specdec_core.models.compiled.failures import CannotCompile  # a second to import
        from specdec_core.models.compiled.packages import Packages

        sources = map(inspect.getsource, (draft_vocabulary, eagle_head))
        facts = [weights, self._nothing[0].dtype, *sources]
        packages = Packages(self._step, self.head.config, facts)
        try:
            with torch.inference_mode(False):
                features = self._nothing[0].shape[1]
                return packages.open("eagle", *example(*self._stores(), features))
        except CannotCompile as reason:
            warnings.warn(f"running the EAGLE head without a graph: {reason}", stacklevel=3)
            return None

    def _stores(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and states of all tokens, as they are now: a pool may have grown."""
        keys, values, states = (store.tensor for store in self.cache.stores())
        return keys, values, states

    @property
    def lengths(self) -> list[int]:
        return [self.length(row) for row in range(self.cache.slots)]

    def _held(self, row: int) -> int:
        """The number of tokens fed, with the target's features or the head's own states."""
        return self.cache.lengths[row] + self._begun[row]

    def length(self, row: int) -> int:
        """How many tokens `row` holds; drafted ones no longer count once the target has features
        of them."""
        held, settled = self._held(row), self._settled[row]
        known = held > settled and self.target.lengths[row] >= settled
        return settled if known else held

    def truncate(self, row: int, length: int) -> None:
        if length > self._held(row):
            raise ValueError(f"row {row} holds {self._held(row)} tokens, cannot keep {length}")
        length = min(length, self.length(row))
        self.cache.truncate(row, max(length - 1, 0))
        self._begun[row] = length > 0
        self._settled[row] = min(self._settled[row], length)

    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        end = self.length(row)
        in_order = next((n for n, place in enumerate(kept) if place != n), len(kept))
        if start + len(kept) > end or in_order == len(kept):
            self.truncate(row, min(start + in_order, end))
            return
        # Within a round, a drafter keeps a branch of the tokens that it has fed.
        self.cache.keep(row, start - 1, kept)
        self._settled[row] = min(self._settled[row], start + in_order)

    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        held = [min(length, self._settled[row]) for length in lengths]
        self.cache.fork(row, rows, [max(length - 1, 0) for length in held])
        for other, length in zip(rows, held, strict=True):
            self._begun[other], self._settled[other] = length > 0, length

    def watch_hidden(self, wanted: bool) -> None:
        self._watched = wanted

    def expect(self, parents: Sequence[int]) -> None:
        self._topologies.expect(parents)

    def _forward(self, batch: Batch) -> Output:
        trees = batch.parents or [None] * len(batch.rows)
        each = zip(batch.rows, batch.tokens, trees, batch.counts, strict=True)
        known = self.target.lengths
        feeds = [
            RowFeed(row, self.length(row), tokens, parents, wanted, known[row])
            for row, tokens, parents, wanted in each
        ]
        last = self.cache.positions
        if any(feed.first + len(feed.tokens) > last for feed in feeds):
            raise ValueError(f"more tokens than the {last} of a slot")
        for feed in feeds:
            self.truncate(feed.row, feed.length)
            self._begun[feed.row] = True
            self._settled[feed.row] = max(self._settled[feed.row], 1)
        # Then there is nothing to put in order.
        if all(len(feed.parts) == 1 and not feed.blank for feed in feeds):
            return self._output(batch, self._read([(feed, feed.parts[0]) for feed in feeds]))
        outputs: list[list[Sequence[Tensor]]] = [
            [self._blank()] if feed.blank else [] for feed in feeds
        ]
        for part in range(max((len(feed.parts) for feed in feeds), default=0)):
            reading = [n for n, feed in enumerate(feeds) if part < len(feed.parts)]
            parts = [(feeds[n], feeds[n].parts[part]) for n in reading]
            counts = [feed.wanted(span) for feed, span in parts]
            split = [output.split(counts) for output in self._read(parts)]
            for n, own in zip(reading, zip(*split, strict=True), strict=True):
                outputs[n].append(own)
        each_part = [own for row in outputs for own in row]
        if not each_part:  # nothing but a sequence's first token
            return self._output(batch, [torch.empty(0)] * 4)
        return self._output(batch, [torch.cat(each) for each in zip(*each_part, strict=True)])

    def _output(self, batch: Batch, outputs: Sequence[Tensor]) -> Output:
        logits, chosen, read, sure = outputs
        return Output(batch.counts, logits, read if self._watched else None, chosen, sure)

    def _blank(self) -> Sequence[Tensor]:
        """The outputs after a sequence's first token, which is not fed."""
        zeros = self._nothing[0].new_zeros
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        alike = torch.full((1,), 1 / self.vocab_size, device=self.device)
        width = self.head.settings.hidden_size
        return zeros(1, self.vocab_size), first, zeros(1, width), alike

    def _read(self, parts: Sequence[tuple[RowFeed, Span]]) -> list[Tensor]:
        """Append parts of several rows. Returns the outputs at their wanted tokens, row after row;
        see :class:`EagleStep`."""
        batch = Batch(
            [feed.row for feed, _ in parts],
            [feed.tokens[slice(*span)] for feed, span in parts],
            [feed.parents_until(span) for feed, span in parts],
            [feed.wanted(span) for feed, span in parts],
        )
        counts = [len(row) for row in batch.tokens]
        window = self.cache.open_window(batch.rows, counts)
        packed = PackedSequence.of(batch, window.ends, self._topologies)
        new = [(each, number) for each, span in parts for number in each.numbers(span)]
        before = [(each.row, each.before(number)) for each, number in new]
        # A sequence's first token is not in the cache.
        rows, numbers = zip(*before, strict=True)
        _, places = self.cache.at(rows, [max(number - 1, 0) for number in numbers])
        read = [place if number else -1 for place, number in zip(places, numbers, strict=True)]
        feed = [packed.tokens, window.rows, window.positions, packed.positions, read]
        known = [n for n, (each, number) in enumerate(new) if each.has_features(number)]
        featured = {n: before[n] for n in known}
        outputs = self._run(torch.tensor(feed, device=self.device), packed, featured)
        self.cache.append(batch.rows, counts)
        for each, span in parts:
            settled = each.known(span)
            if settled and self._settled[each.row] == settled.start:
                self._settled[each.row] = settled.stop
        return [output[: len(packed.wanted)] for output in outputs]

    def _features(self, featured: Mapping[int, tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The target's features before new tokens, and their numbers. `featured` maps each
        number to the (row, number) of the token before."""
        if not featured:
            return self._nothing
        rows, numbers = zip(*featured.values(), strict=True)
        features = self.target.features(rows, numbers)
        if self._columns is not None:
            features = features[:, self._columns]
        return features.to(self._nothing[0].dtype), torch.tensor([*featured], device=self.device)

    def _run(
        self, feed: Tensor, packed: PackedSequence, featured: Mapping[int, tuple[int, int]]
    ) -> Sequence[Tensor]:
        wanted = torch.tensor(packed.wanted or [0], device=self.device)
        given = feed, wanted, *self._features(featured)
        outputs: Sequence[Tensor]
        if not self._compact:
            nothing, spans = self._nothing[1], MaskedSpans(packed.rows, None)
            outputs = self._step(*given, nothing, nothing, *self._stores(), plan=spans)
            return outputs
        inputs = [*given, *SeenPlaces(packed.rows, None).tables(self.device), *self._stores()]
        if self._graph is not None:
            return self._graph(inputs)
        outputs = self._step(*inputs, self.cache.table)
        return outputs


def _columns(settings: EagleSettings, kept: Sequence[int]) -> Tensor | None:
    """The columns that a head reads of the features of the layers `kept`; None: all, in order."""
    layers, width = settings.feature_layers, settings.target_hidden_size
    assert set(layers) <= set(kept), f"features of {layers}, kept are those of {kept}"
    if tuple(layers) == tuple(kept):
        return None
    return torch.cat([torch.arange(width) + kept.index(layer) * width for layer in layers])
