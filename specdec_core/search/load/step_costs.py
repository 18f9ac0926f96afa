"""What the rounds of simulated requests do and cost, each computed once.

The seconds of a step are a sum over its rows, but for what a forward takes whatever it does, for
tokens beyond its knee, and for the number of a draft's forwards, which is that of the row with the
most. What a row brings is the same whenever the same answer is in the same state, so that a step
costs no more than adding up what its rows bring. What an answer's rounds do follows from one to the
next; what all of them cost is computed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import numpy as np

from specdec_core.cost.steps import FEW, StepTimes, Work
from specdec_core.search.load.answers import Answers

_KNOWN = 1024  # different requests whose rounds are kept
_TOGETHER = 256  # requests whose rounds are costed together

# What a row brings to a step. To the forwards of each draft: how many it takes part in, tokens fed,
# seconds, and further seconds where rows have few tokens. To the target's forward: tokens fed,
# candidates, and seconds, by the terms that may hold for it; with those of the engine.
Share = Sequence[float]
_OF_DRAFT = 4
# What a round does: candidates, tokens that the target is fed and those that it holds before; which
# draft proposes (none: -1), in how many forwards of how many tokens, behind how many; and by then,
# tokens generated and those that each draft has read.
_Done = tuple[int, ...]
_HELD, _GENERATED = 2, 7
_RESTING = (-1, 0, 0, 0)

# Where in a share something begins, and of a forward: what it takes whatever it does, the knee, and
# what a token beyond it takes.
_Terms = tuple[int, float, int, float]


class RequestShape(NamedTuple):
    """What a request asks for: a recorded answer, after a prompt of so many tokens, up to `most`
    tokens of it."""

    answer: int
    prompt_tokens: int
    most: int


class State(NamedTuple):
    """A request between rounds: tokens `generated` in so many `rounds`, and how much of its text
    the target holds (`held`) and each draft (`read`)."""

    generated: int
    rounds: int
    held: int
    read: tuple[int, ...]


class RoundSpan:
    """The rounds of a request from the state `start` on, while at least `least` requests decode:
    the first one, or all others to the end of its answer. Of each: its candidates (`drafted`) and
    its row's share of the step (`shares`); and of all but a first one the seconds of a step without
    other rows (`alone`)."""

    __slots__ = (
        *("_done", "_prompt", "least", "start"),
        *("alone", "drafted", "ends", "rounds", "shares"),
    )

    def __init__(
        self,
        ask: RequestShape,
        least: int,
        start: State,
        done: list[_Done],
        shares: list[Share],
        alone: list[float],
    ) -> None:
        self._prompt, self.least, self.start = ask.prompt_tokens, least, start
        self._done, self.shares, self.alone = done, shares, alone
        self.drafted = [each[0] for each in done]
        self.rounds = len(done)
        self.ends = done[-1][_GENERATED] >= ask.most  # whether the last round ends the answer

    def state(self, rounds: int) -> State:
        """After so many of the rounds."""
        if not rounds:
            return self.start
        done = self._done[rounds - 1]
        generated, read = done[_GENERATED], done[_GENERATED + 1 :]
        return State(generated, self.start.rounds + rounds, self._prompt + generated - 1, read)

    def held(self, rounds: int) -> int:
        """Tokens of the text that the target holds after so many of the rounds."""
        return self._done[rounds][_HELD]


class RequestRounds:
    """The rounds of requests that ask for the same. They begin together with others, `together`."""

    def __init__(self, costs: StepCosts, ask: RequestShape) -> None:
        self.costs, self.ask = costs, ask
        self.together: Sequence[RequestRounds] = (self,)
        self.known: dict[tuple[int, State], RoundSpan] = {}

    def stretch(self, least: int, state: State) -> RoundSpan:
        """The rounds from a state on, to the end of the answer, or the first one."""
        known = self.known.get((least, state))
        if known is None:
            self.costs.look(least, self, state)
            known = self.known[least, state]
        return known

    def begun(self, least: int) -> State:
        """After the first round, when a draft that reads along has read it, too."""
        costs, (answer, prompt, _) = self.costs, self.ask
        generated = costs.answers.round(answer, 0, 0, least).generated
        held, read = prompt + generated - 1, costs.unread
        return State(generated, 1, held, (held,) if costs.reads_along else read)


class StepCosts:
    """What steps cost by `times` when requests are given `answers`. Raises :class:`UserError` for
    a draft of the answers without times."""

    def __init__(self, answers: Answers, times: StepTimes) -> None:
        self.answers, self.mixes = answers, times.mixes
        self.drafts = answers.drafts
        self.unread = (0,) * len(self.drafts)  # of a text that no draft has read
        # Of several drafts each is lazy.
        self.reads_along = answers.draft is not None and not answers.lazy
        self._course = lru_cache(_KNOWN)(lambda ask: RequestRounds(self, ask))
        self._looks_up = cache(answers.looks_up)
        self._engine = engine = times.engine
        self._drafts = [times.draft(name) for name in self.drafts]
        # Of the target without candidates, with them, and after a draft's forward.
        kinds = [times.verifying(False, candidates=False), times.verifying(False)]
        kinds += [times.verifying(True)] if self.drafts else []
        different = [t for n, t in enumerate(kinds) if t not in kinds[:n]]
        # Where in a share the parts of each draft begin, and those of the target.
        self._tokens = _OF_DRAFT * len(self.drafts)
        self._forwards = range(0, self._tokens, _OF_DRAFT)
        # For each round and step; a field of a pydantic model takes several times as long.
        self._per_step = engine.per_step
        self._of_target, self._of_draft = (
            [(t.per_row, t.per_token, t.per_cached, t.per_pair, t.per_few_pair) for t in of]
            for of in (different, self._drafts)
        )
        self._proposing: list[_Terms] = [
            (first, t.fixed + engine.per_draft_forward, t.knee, t.per_token_beyond)
            for first, t in zip(self._forwards, self._drafts, strict=True)
        ]
        columns = [self._tokens + 2 + different.index(terms) for terms in kinds]
        self._verifying: list[_Terms] = [
            (column, t.fixed, t.knee, t.per_token_beyond)
            for column, t in zip(columns, kinds, strict=True)
        ]

    def courses(self, asks: Iterable[RequestShape]) -> Iterator[RequestRounds]:
        """That of each request. Some hundred at a time are costed together."""
        asks = iter(asks)
        while several := [self._course(ask) for ask in islice(asks, _TOGETHER)]:
            together = list(dict.fromkeys(several))
            for course in together:
                course.together = together
            yield from several

    def look(self, least: int, course: RequestRounds, state: State) -> None:
        """Cost the rounds of a course from a state on; where it has just begun, together with those
        of others."""
        if not state.rounds:
            done = self._follow(course.ask, least, state)
            parts: list[Share] = [self._share(done[0], looks_up=False)]
            course.known[least, state] = RoundSpan(course.ask, least, state, done, parts, [])
            return
        wanted = {course: state}
        if state == course.begun(least):
            begun = {other: other.begun(least) for other in course.together}
            wanted |= {
                other: each
                for other, each in begun.items()
                if each.generated < other.ask.most and (least, each) not in other.known
            }
        followed = [self._follow(each.ask, least, start) for each, start in wanted.items()]
        columns = np.array(list(chain.from_iterable(followed))).T
        shares = np.array(self._share(columns, self._looks_up(least)))
        begin = list(accumulate(map(len, followed), initial=0))
        read = np.zeros(begin.pop(), dtype=bool)
        read[begin] = self.reads_along
        rows, alone = zip(*shares.tolist(), strict=True), iter(self._alone(shares, read).tolist())
        for (each, start), done in zip(wanted.items(), followed, strict=True):
            parts = list(islice(rows, len(done)))
            seconds = list(islice(alone, len(done)))
            each.known[least, start] = RoundSpan(each.ask, least, start, done, parts, seconds)

    def reading(self, tokens: int, held: int) -> Share:
        """The share of a row of which so many tokens are read behind those held."""
        return [0.0] * self._tokens + self._verified(tokens, held)

    def seconds(self, shares: Sequence[Share], drafting: bool = False) -> float:
        """Seconds of a step of rows with these shares; `drafting`, if a draft has had a forward in
        it before. What reading and entering add to it is not counted (:meth:`beginning`)."""
        sums: Sequence[float]
        most: Sequence[float] | dict[int, float]
        if len(shares) == 1:
            sums = most = shares[0]
        else:
            columns = list(zip(*shares, strict=True))
            sums, most = list(map(sum, columns)), {n: max(columns[n]) for n in self._forwards}
        seconds = self._per_step
        for draft in self._proposing:
            if forwards := most[draft[0]]:
                drafting = True
                seconds = _propose(seconds, draft, sums, forwards)
        return seconds + self._verify(sums, drafting)

    def prefill(self, shares: Sequence[Share], drafting: bool) -> float:
        """Seconds of a forward of the target over rows that are read, and no others."""
        return self._verify(list(map(sum, zip(*shares, strict=True))), drafting)

    def following(self, rows: Iterable[tuple[int, int]]) -> float:
        """Seconds in which the first draft reads rows, (tokens, context) each."""
        return self._drafts[0].seconds(Work.of(rows))

    def beginning(self, read: int, entering: int) -> float:
        """Seconds that the engine adds when so many tokens of prompts are read and so many requests
        enter."""
        return self._engine.per_read * read + self._engine.per_entering * entering

    def _follow(self, ask: RequestShape, least: int, state: State) -> list[_Done]:
        """The first round of a request, or all others from a state on."""
        answer, prompt, most = ask
        generated, number, held, unread = state
        answers, read = self.answers, list(unread)
        whole = most == answers.lengths[answer]
        rounds: list[_Done] = []
        while True:
            each = answers.round(answer, generated, number, least)
            # Rounds of a whole recorded answer were drafted within its room.
            if each.drafted >= most - generated and not whole:
                each = each.within(most - generated - 1)
            drafted, written, forwards, positions, name = each
            text, proposed = prompt + generated, _RESTING
            if forwards and (draft := name or answers.draft) is not None:
                place = self.drafts.index(draft)
                behind = read[place]
                # The first forward reads the text's unread end, of at least one token, too.
                tokens = positions + text - behind - 1
                proposed = place, forwards, tokens, behind + forwards // 2
                read[place] = text - 1 + min(written, forwards)
            generated, number = generated + written, number + 1
            rounds.append((drafted, text - held + drafted, held, *proposed, generated, *read))
            if generated >= most or number == 1:
                return rounds
            held = text + written - 1

    def _share(self, done: Any, looks_up: bool) -> list[Any]:
        """The share of a round, or the shares' columns of rounds whose numbers are arrays."""
        drafted, tokens, held, place, forwards, read, context = done[:_GENERATED]
        columns = []
        for number, terms in enumerate(self._of_draft):
            per_row, per_token, per_cached, per_pair, per_few_pair = terms
            proposes = place == number
            seconds = (per_row + per_cached * context) * forwards
            seconds = seconds + (per_token + per_pair * context) * read
            few = per_few_pair * read * context
            columns += [proposes * each for each in (forwards, read, seconds, few)]
        engine = self._engine
        added = engine.per_row + engine.per_candidate * drafted
        if looks_up:
            added = added + engine.per_lookup
        return columns + self._verified(tokens, held, drafted, added)

    def _verified(self, tokens: Any, held: Any, candidates: Any = 0, added: Any = 0.0) -> list[Any]:
        pairs = tokens * (held + (tokens - 1) / 2)
        few = pairs * (tokens < FEW)
        seconds = [
            added + row + token * tokens + cached * held + pair * pairs + few_pair * few
            for row, token, cached, pair, few_pair in self._of_target
        ]
        return [tokens, candidates, *seconds]

    def _alone(self, shares: np.ndarray, drafting: np.ndarray) -> np.ndarray:
        """Seconds of steps (S,) of one row each, from its shares (columns, S)."""
        seconds = np.full(len(drafting), self._per_step)
        for draft in self._proposing:
            forwards = shares[draft[0]]
            drafting = drafting | (forwards > 0)
            seconds = _propose(seconds, draft, shares, forwards)
        kinds = np.where(drafting, 2, shares[self._tokens + 1] > 0)
        for kind, terms in enumerate(self._verifying):
            of = kinds == kind
            seconds[of] += _verify(terms, shares[:, of], self._tokens)
        return seconds

    def _verify(self, sums: Sequence[float], drafting: bool) -> float:
        kind = 2 if drafting else 1 if sums[self._tokens + 1] else 0
        seconds: float = _verify(self._verifying[kind], sums, self._tokens)
        return seconds


# Of a step, or of steps whose numbers are arrays: from the sums of their rows' shares.


def _propose(seconds: Any, terms: _Terms, sums: Any, forwards: Any) -> Any:
    """With the seconds of a draft's forwards."""
    first, per_forward, knee, per_token_beyond = terms
    rows, tokens, added, few = sums[first : first + _OF_DRAFT]
    beyond = tokens - forwards * knee
    few = few * (tokens < FEW * rows)
    added = forwards * per_forward + added
    return seconds + added + (per_token_beyond * beyond * (beyond > 0) + few)


def _verify(terms: _Terms, sums: Any, tokens: int) -> Any:
    """Seconds of the target's forward, whose tokens are the sum of so many."""
    column, fixed, knee, per_token_beyond = terms
    beyond = sums[tokens] - knee
    return fixed + sums[column] + per_token_beyond * beyond * (beyond > 0)
