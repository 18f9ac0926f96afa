"""A draft model's trace, indexed by where a round begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.drafting.policies.policy import Rule
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.recorded import KnownRounds
from specdec_core.recordings.rounds import NO_ARM, ReplayedRounds
from specdec_core.recordings.schema import Trace


class Track:
    """A trace, indexed by where a round begins: T starts, all prompts' in order.

    Candidate j (from 0) of a round that begins at start s is row `windows[s, j]` of the trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.header = trace, trace.header
        lengths = trace.lengths
        self.prompt = np.repeat(np.arange(len(lengths)), lengths)
        self.position = trace.position[trace.trajectory].astype(np.int64)
        self.left = np.repeat(lengths, lengths) - self.position  # tokens to the end of the output
        self._values: dict[str, np.ndarray] = {}

    @cached_property
    def firsts(self) -> np.ndarray:
        """The starts at the beginning of each prompt's output (P,)."""
        return np.flatnonzero(self.position == 0)

    @cached_property
    def agreeing(self) -> np.ndarray:
        """Candidates in a row that would be accepted from each start (T,)."""
        ends = np.arange(len(self.left)) + self.left
        stops = np.where(~self.trace.agrees, np.arange(len(ends)), len(ends))
        following = np.minimum.accumulate(stops[::-1])[::-1]
        return np.asarray(np.minimum(following, ends) - np.arange(len(ends)))

    @cached_property
    def ranks(self) -> np.ndarray:
        """The rank of the target's token in the draft's distribution, 0 the most likely (T,). Of
        equally likely tokens the first is the draft's choice."""
        recorded = self.trace.rank[self.trace.trajectory].astype(np.int64)
        return np.where(self.trace.agrees, 0, np.maximum(recorded, 1))

    def acceptance(self, most: int) -> np.ndarray:
        """How often the target's token has rank 0 … `most` - 1 in the draft model (most,)."""
        return np.bincount(self.ranks, minlength=most)[:most] / max(len(self.ranks), 1)

    @cached_property
    def windows(self) -> np.ndarray:
        """Rows of the trace (T, max_draft). Where no round gets to, nothing is recorded, and the
        last recorded row is repeated."""
        trace = self.trace
        rows, starts = trace.trajectory, np.arange(len(self.left))
        # A continuation is the block of rows that begins with step 1.
        begins = np.flatnonzero(trace.step <= 1)
        sizes = np.diff(np.append(begins, len(trace)))
        first = np.flatnonzero(trace.step == 1)
        block = sizes[np.searchsorted(begins, first)]
        before = np.cumsum(trace.lengths) - trace.lengths  # starts of earlier prompts
        at = before[trace.prompt[first]] + trace.position[first]
        begin, count = np.zeros((2, len(starts)), np.int64)
        begin[at], count[at] = first, block
        count[trace.agrees] = 0  # where rejection sampling accepts what was drawn apart
        j = np.arange(self.header.max_draft)
        differs = np.minimum(starts + self.agreeing, starts + self.left - 1)  # index of the start
        on_path = starts[:, None] + j <= differs[:, None]
        beyond = starts[:, None] + j - differs[:, None] - 1
        beyond = np.minimum(beyond, count[differs][:, None] - 1)
        continued = np.where(beyond >= 0, begin[differs][:, None] + beyond, rows[differs][:, None])
        path = rows[np.minimum(starts[:, None] + j, differs[:, None])]
        return np.asarray(np.where(on_path, path, continued))

    @cached_property
    def room(self) -> np.ndarray:
        """The most candidates of a round from each start (T,): none in the first round, which reads
        the prompt to its end, and in other rounds all that leave a place for the target's own
        token and have positions in the draft, which needs none for the last candidate."""
        left = self.header.max_new_tokens - self.position - 1
        if self.trace.positions is not None:
            prompts = np.array([len(tokens) for tokens in self.trace.prompts.tokens])
            text = prompts[self.prompt] + self.position
            left = np.minimum(left, np.maximum(self.trace.positions - text + 1, 0))
        return np.asarray(np.where(self.position == 0, 0, left))

    @cached_property
    def bound(self) -> np.ndarray:
        """The most candidates of a chain from each start (T,): up to an end token, and within its
        room. As far as candidates agree, they are known beyond the recorded window, too."""
        ends = np.isin(self.trace.draft_token, self.header.eos_token_ids)[self.windows]
        stops = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, self.header.max_draft)
        stops = np.maximum(stops, self.agreeing)
        return np.asarray(np.minimum(self.room, stops))

    @cached_property
    def rooms(self) -> list[int]:
        """:attr:`room` as a list."""
        return list(self.room.tolist())

    @cached_property
    def targets(self) -> list[int]:
        """The target's tokens (T,)."""
        return list(self.trace.target_token[self.trace.trajectory].tolist())

    def chain(self, start: int) -> list[int]:
        """The tokens of the chain from a start, as far as recorded."""
        return [self._lists[0][row] for row in self._windows[start]]

    def signals(self, start: int, drafted: int, new: int, calls: int) -> Signals:
        """The signals, in slot 0, of `new` candidates after the first `drafted` ones of the chain
        from a start; the chain took `calls` forwards of the draft model so far."""
        rows = self._windows[start][drafted : drafted + new]
        return RecordedSignals(self.trace, rows, self._lists, drafted + 1, calls)

    @cached_property
    def _windows(self) -> list[list[int]]:
        return list(self.windows.tolist())

    @cached_property
    def _lists(self) -> list[list[Any]]:
        """Tokens, largest probabilities, probabilities and entropies of all rows."""
        trace = self.trace
        columns = (trace.draft_token, trace.top_probability, trace.probability, trace.entropy)
        return [column.tolist() for column in columns]

    # Chains, by length policy

    def drafted(self, rule: Rule) -> np.ndarray:
        """Candidates that `rule` drafts from each start, its bound aside (T,)."""
        stops = np.asarray(rule.stops(self.compared(rule)))
        if rule.min_tokens > 1:
            stops[:, : rule.min_tokens - 1] = False
        first = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, self.header.max_draft)
        return np.asarray(np.minimum(first, rule.settings.max_tokens))

    def values(self, rule: Rule) -> np.ndarray:
        """The value of every recorded candidate (R,) in double precision."""
        key = _key(rule)
        if key not in self._values:
            everything = RuleSignals(self.trace)
            self._values[key] = np.asarray(rule.values(everything), dtype=np.float64)
        return self._values[key]

    def compared(self, rule: Rule) -> np.ndarray:
        """The value that `rule` compares after each candidate of a round from each start
        (T, max_draft)."""
        key = f"{_key(rule)} windows {rule.cumulative} {rule.lagging}"
        if key not in self._values:
            values = self.values(rule)[self.windows]
            if rule.lagging:
                values[:, 0] = 1.0
            self._values[key] = np.cumprod(values, axis=1) if rule.cumulative else values
        return self._values[key]

    def chains(self, drafted: np.ndarray) -> KnownRounds:
        """The chains of up to `drafted` candidates (T,), within their bounds."""
        drafted = np.minimum(drafted, self.bound)
        accepted = np.minimum(drafted, self.agreeing)
        return KnownRounds(drafted, accepted, drafted, drafted, drafted)

    # Static trees

    def trees(self, children: Sequence[Sequence[int]]) -> KnownRounds:
        """Greedy trees of the most likely tokens. `children` is the number of children of each node
        of each level, from the root on."""
        starts = np.arange(len(self.left))
        depth = np.minimum(self.room, len(children))
        accepted = np.zeros(len(starts), np.int64)
        node, follows = np.zeros(len(starts), np.int64), np.ones(len(starts), bool)
        for level, counts in enumerate(children):
            offsets = np.cumsum([0, *counts[:-1]])
            rank = self.ranks[np.minimum(starts + level, len(starts) - 1)]
            follows &= (level < depth) & (level < self.left) & (rank < np.asarray(counts)[node])
            node = np.where(follows, offsets[node] + rank, 0)
            accepted += follows
        nodes = np.cumsum([0, *map(sum, children)])
        inner = np.cumsum([0, *(sum(c > 0 for c in counts) for counts in children)])
        return KnownRounds(nodes[depth], accepted, depth, depth, inner[depth])

    # Rounds

    def walk_all(self, drafts: KnownRounds) -> ReplayedRounds:
        """The rounds when one that begins at start s drafts as `drafts` says; all prompts advance
        together."""
        generated = self._generated(drafts)
        starts = self.firsts
        ends = starts + self.left[starts]
        visited = np.zeros(len(generated), dtype=bool)
        while len(starts):
            visited[starts] = True
            starts = starts + generated[starts]
            unfinished = starts < ends
            starts, ends = starts[unfinished], ends[unfinished]
        return self._rounds(drafts, np.flatnonzero(visited))

    def everywhere(self, drafts: KnownRounds) -> ReplayedRounds:
        """A round from every start, which drafts as `drafts` says."""
        return self._rounds(drafts, np.arange(len(self.left)))

    def _generated(self, drafts: KnownRounds) -> np.ndarray:
        """Tokens that the round from each start adds (T,)."""
        return np.asarray(np.minimum(drafts.accepted + 1, self.left))

    def _rounds(self, drafts: KnownRounds, rounds: np.ndarray) -> ReplayedRounds:
        """The rounds from these starts."""
        return ReplayedRounds(
            prompt=self.prompt[rounds],
            position=self.position[rounds],
            drafted=drafts.drafted[rounds],
            accepted=drafts.accepted[rounds],
            generated=self._generated(drafts)[rounds],
            draft_forwards=drafts.draft_forwards[rounds],
            depth=drafts.depth[rounds],
            draft_tokens=drafts.draft_tokens[rounds],
            arm=np.full(len(rounds), NO_ARM),
            ids=self.trace.prompts.ids,
        )


def _key(rule: Rule) -> str:
    """What the rule's values depend on."""
    if type(rule).values is Rule.values:
        return rule.reads[0]
    return f"{type(rule).__name__} {rule.settings.model_dump_json(exclude=set(rule.apart))}"


class TraceSignals(Signals):
    """Candidates of a trace: its `rows`."""

    trace: Trace
    rows: Any

    def measure(self, name: str) -> Tensor:
        return _read_only(getattr(self.trace, name)[self.rows])

    @cached_property
    def hidden(self) -> Tensor:
        return _read_only(self.trace.hidden[self.rows])

    def top_probabilities(self, k: int) -> Tensor:
        recorded = self.trace.header.top_k
        if k > recorded:
            raise UserError(
                f"the policy reads the {k} largest probabilities, the recording has {recorded}"
            )
        return _read_only(self.trace.top_probs[self.rows, :k])


class RecordedSignals(TraceSignals):
    """Recorded candidates, rows of a trace, as the signals of slot 0. `lists` are the tokens, the
    largest probabilities, the probabilities and the entropies of all rows."""

    def __init__(
        self,
        trace: Trace,
        rows: Sequence[int],
        lists: Sequence[Sequence[Any]],
        position: int,
        calls: int,
    ) -> None:
        self.trace, self.rows, self._more = trace, rows, (lists, position, calls)
        self.slots = [0] * len(rows)
        self.positions = range(position, position + len(rows))
        self.calls, self.free = [calls] * len(rows), [False] * len(rows)
        self.tokens, self.top_probability, self.probability, self.entropy = (
            [values[row] for row in rows] for values in lists
        )

    def only(self, places: Sequence[int]) -> Signals:
        lists, position, calls = self._more
        if len(places) == len(self.rows):
            return self
        [place] = places
        return RecordedSignals(self.trace, [self.rows[place]], lists, position + place, calls)


class RuleSignals(TraceSignals):
    """All candidates of a trace as the signals that a rule reads."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.rows = trace, slice(None)
        self.slots = self.tokens = range(len(trace))


def _read_only(values: np.ndarray) -> Tensor:
    """`values` as a tensor on the same memory. Arrow's buffers are not writable, and
    `torch.from_numpy` warns of that; what reads signals writes to none."""
    tensor: Tensor = torch.from_dlpack(values)
    return tensor
