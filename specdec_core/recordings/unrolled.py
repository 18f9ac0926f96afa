"""What a head drafts from every place of a sequence, and replaying it.

A draft model's candidate depends on the sequence before it alone, so one pass over a sequence tells
what it drafts everywhere. A head reads the target's features of the sequence and its own states
after that: what it drafts depends on where the draft begins, too. So its chain is drafted from
every place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.drafting.recorded import KnownRounds
from specdec_core.models.eagle import AnyHead
from specdec_core.models.eagle.runner import EagleRunner
from specdec_core.models.runner import Batch, ModelRunner
from specdec_core.recordings.schema import Header
from specdec_core.recordings.track import Track

_STARTS = 16  # chains drafted together


@dataclass(frozen=True, slots=True)
class UnrolledChain:
    """The candidates (n) after `position` generated tokens, the distributions (n, vocabulary) they
    were drawn from, and what the output layer read (n, width)."""

    position: int
    tokens: list[int]
    q: Tensor
    hidden: Tensor


class ChainStart(NamedTuple):
    """A chain begins after `position` generated tokens, with `token` as the last token, and has
    at most `most` candidates."""

    token: int
    position: int
    most: int


def draft_chains(
    runner: ModelRunner,
    starts: Sequence[ChainStart],
    ends: Collection[int],
    distributions: Callable[[Tensor], Tensor],
    draw: Callable[[Tensor, Sequence[int]], list[int]],
) -> Iterator[UnrolledChain]:
    """The chain of each of `starts`, the first start in row 1 of `runner`; a chain stops
    after a token of `ends`. `distributions` makes them of logits, `draw` draws from them at
    positions of the output."""
    chains: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in starts]
    feed = {place: start.token for place, start in enumerate(starts)}
    step = 0
    while feed:
        rows = [1 + place for place in feed]
        after = runner.forward(Batch(rows, [[token] for token in feed.values()]))
        assert after.hidden is not None  # it is watched
        q = distributions(after.logits)
        tokens = draw(q, [starts[place].position + step for place in feed])
        step += 1
        following = {}
        for row, (place, token) in enumerate(zip(feed, tokens, strict=True)):
            chains[place].append((token, q[row], after.hidden[row]))
            if token not in ends and step < starts[place].most:
                following[place] = token
        feed = following
    for start, steps in zip(starts, chains, strict=True):
        drawn, qs, states = zip(*steps, strict=True)
        yield UnrolledChain(start.position, list(drawn), torch.stack(qs), torch.stack(states))


class UnrolledText:
    """The target's features of a sequence; each row of a head may see a beginning of it."""

    def __init__(self, feature_layers: tuple[int, ...], vocab_size: int, rows: int) -> None:
        self.feature_layers, self.vocab_size = feature_layers, vocab_size
        self.lengths = [0] * rows  # as much as each row sees
        self.read: Tensor | None = None  # the features of all its tokens (n, layers · width)

    def features(self, rows: Sequence[int], places: Sequence[int]) -> Tensor:
        """See :meth:`LocalRunner.features`: of the same sequence in every row."""
        assert self.read is not None
        return self.read[list(places)]


class HeadRecorder:
    """Drafts the chains of `head` from all places of a sequence, by the target's features of it,
    which are inputs of its `layers`."""

    def __init__(
        self,
        head: AnyHead,
        layers: tuple[int, ...],
        vocab_size: int,
        max_length: int,
        header: Header,
    ) -> None:
        self.header = header
        self._like = next(head.layers.parameters())
        self._text = UnrolledText(layers, vocab_size, 1 + _STARTS)
        self._runner = EagleRunner(head, self._text, 1 + _STARTS, max_length)
        self._runner.watch_hidden(True)

    def chains(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        features: Tensor,
        distributions: Callable[[Tensor], Tensor],
        draw: Callable[[Tensor, Sequence[int]], list[int]],
    ) -> Iterator[UnrolledChain]:
        """The chain from every place of `output`, in their order; see :func:`draft_chains`.
        The target's `features` are of all tokens but the last, (n, layers · width)."""
        text = [*prompt, *output[:-1]]
        runner, read = self._runner, self._text
        read.read = features.to(self._like.device, self._like.dtype)
        for row in range(1 + _STARTS):
            runner.truncate(row, 0)
            read.lengths[row] = len(text)
        # As far as every chain begins with the target's features; the last token comes with it.
        runner.prefill([0], [text])
        header = self.header
        for first in range(0, len(output), _STARTS):
            starts = []
            for row, place in enumerate(range(first, min(first + _STARTS, len(output))), 1):
                # The target adds a token to every round; a first candidate is recorded anyway.
                most = min(header.max_draft, max(header.max_new_tokens - 1 - place, 1))
                length = read.lengths[row] = len(prompt) - 1 + place
                starts.append(ChainStart(text[length], place, most))
            rows = range(1, 1 + len(starts))
            runner.fork(0, rows, [read.lengths[row] for row in rows])
            yield from draft_chains(runner, starts, header.eos_token_ids, distributions, draw)


class UnrolledTrack(Track):
    """The trace of a head, indexed by where a round begins."""

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The candidates recorded from each start (T,)."""
        begins = self.trace.trajectory
        return np.diff(np.append(begins, len(self.trace)))

    @cached_property
    def windows(self) -> np.ndarray:
        offsets = np.arange(self.header.max_draft)
        beyond = np.minimum(offsets, self._sizes[:, None] - 1)
        return np.asarray(self.trace.trajectory[:, None] + beyond)

    @cached_property
    def agreeing(self) -> np.ndarray:
        offsets = np.arange(self.header.max_draft)
        starts = np.arange(len(self.left))
        tokens = self.trace.draft_token[self.windows]
        targets = np.asarray(self.targets)
        there = (offsets < self._sizes[:, None]) & (offsets < self.left[:, None])
        place = np.minimum(starts[:, None] + offsets, len(targets) - 1)
        same = there & (tokens == targets[place])
        return np.asarray(np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1)))

    def trees(self, children: Sequence[Sequence[int]]) -> KnownRounds:
        raise UserError("of a head chains are recorded, not trees")
