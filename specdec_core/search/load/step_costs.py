"""What the rounds of simulated requests do and cost, each computed once.

The seconds of a step are a sum over its rows, but for what a forward takes whatever it does, for
tokens beyond its knee, and for the number of a draft's forwards, which is that of the row with the
most. What a row brings is the same whenever the same answer is in the same state, so that a step
costs no more than adding up what its rows bring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from specdec_core.cost.steps import FEW, ForwardTerms, StepTimes, Work
from specdec_core.search.load.answers import Answers

_KNOWN = 1024  # different requests whose rounds are kept

# What a row brings to a step. To the forwards of each draft: how many it takes part in, tokens fed,
# seconds, and further seconds where rows have few tokens. To the target's forward: tokens fed,
# candidates, and seconds, by the terms that may hold for it; with those of the engine.
Share = tuple[float, ...]
_OF_DRAFT = 4
_NO_DRAFT = (0,) * _OF_DRAFT


class Ask(NamedTuple):
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


class CostedRound:
    """A round of a request, from `state` to the state `then`, as it is when at least `least`
    requests decode: its candidates (`drafted`), and its row's `share` of the step."""

    __slots__ = ("after", "course", "drafted", "last", "least", "seconds", "share", "state", "then")

    def __init__(self, course: Course, least: int, state: State) -> None:
        self.course, self.least, self.state = course, least, state
        self.drafted, self.share, self.then = course.costs.round(course.ask, least, state)
        self.last = self.then.generated >= course.ask.most
        self.after: CostedRound | None = None  # of the same requests, once it is known
        self.seconds: float | None = None  # of a step without other rows, likewise

    def follow(self) -> CostedRound:
        """The round after it, while the same requests decode."""
        after = self.after
        if after is None:
            after = self.after = self.course.round(self.least, self.then)
        return after

    def alone(self) -> float:
        """Seconds of a step without other rows."""
        if self.seconds is None:
            self.seconds = self.course.costs.seconds([self.share])
        return self.seconds


class Course:
    """The rounds of requests that ask for the same."""

    def __init__(self, costs: StepCosts, ask: Ask) -> None:
        self.costs, self.ask = costs, ask
        self._rounds: dict[tuple[int, State], CostedRound] = {}

    def round(self, least: int, state: State) -> CostedRound:
        """The round from a state."""
        key = least, state
        known = self._rounds.get(key)
        if known is None:
            known = self._rounds[key] = CostedRound(self, least, state)
        return known


class StepCosts:
    """What steps cost by `times` when requests are given `answers`. Raises :class:`UserError` for
    a draft of the answers without times."""

    def __init__(self, answers: Answers, times: StepTimes) -> None:
        self.answers, self.mixes = answers, times.mixes
        self.drafts = answers.drafts
        self.unread = (0,) * len(self.drafts)  # of a text that no draft has read
        self.course = lru_cache(_KNOWN)(lambda ask: Course(self, ask))
        self._looks_up = cache(answers.looks_up)
        self._engine = engine = times.engine
        # For each round and step; a field of a pydantic model takes several times as long.
        self._per_step, self._per_row = engine.per_step, engine.per_row
        self._per_candidate = engine.per_candidate
        self._draft = [times.draft(name) for name in self.drafts]
        # Of the target without candidates, with them, and after a draft's forward.
        kinds = [times.verifying(False, candidates=False), times.verifying(False)]
        self._kinds = [*kinds, times.verifying(True)] if self.drafts else kinds
        different = [t for n, t in enumerate(self._kinds) if t not in self._kinds[:n]]
        # Where in a share the parts of each draft begin, and those of the target.
        self._tokens = _OF_DRAFT * len(self.drafts)
        self._forwards = range(0, self._tokens, _OF_DRAFT)
        self._columns = [self._tokens + 2 + different.index(terms) for terms in self._kinds]
        self._of_target, self._of_draft = (
            [(t.per_row, t.per_token, t.per_cached, t.per_pair, t.per_few_pair) for t in of]
            for of in (different, self._draft)
        )

    def round(self, ask: Ask, least: int, state: State) -> tuple[int, Share, State]:
        """The candidates of a request's round, its row's share, and the state after it."""
        generated, rounds, held, read = state
        answer, prompt, most = ask
        answers, text, left = self.answers, prompt + generated, most - generated
        each = answers.round(answer, generated, rounds, least)
        # Rounds of a whole recorded answer were drafted within its room.
        if each.drafted >= left and most != answers.lengths[answer]:
            each = each.within(left - 1)
        drafted, written, forwards, positions, name = each
        added = self._per_row + self._per_candidate * drafted
        if rounds and self._looks_up(least):
            added += self._engine.per_lookup
        verified = self._verified(text - held + drafted, held, drafted, added)
        draft = name or answers.draft
        if not forwards or draft is None:
            share = _NO_DRAFT * len(read) + verified
        else:
            place = self.drafts.index(draft)
            per_row, per_token, per_cached, per_pair, per_few_pair = self._of_draft[place]
            # The first forward reads the text's unread end, of at least one token, too.
            tokens = positions + text - read[place] - 1
            context = read[place] + forwards // 2
            seconds = (per_row + per_cached * context) * forwards
            seconds += (per_token + per_pair * context) * tokens
            drawn = forwards, tokens, seconds, per_few_pair * tokens * context
            before, after = read[:place], read[place + 1 :]
            share = _NO_DRAFT * len(before) + drawn + _NO_DRAFT * len(after) + verified
            read = (*before, text - 1 + (written if written < forwards else forwards), *after)
        then = State(generated + written, rounds + 1, text + written - 1, read)
        return drafted, share, then

    def reading(self, tokens: int, held: int) -> Share:
        """The share of a row of which so many tokens are read behind those held."""
        return _NO_DRAFT * len(self.drafts) + self._verified(tokens, held)

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
        for terms, first in zip(self._draft, self._forwards, strict=True):
            if forwards := most[first]:
                rows, tokens, added, few = sums[first : first + _OF_DRAFT]
                drafting = True
                seconds += forwards * (terms.fixed + self._engine.per_draft_forward) + added
                seconds += _beyond(terms, tokens, forwards) + (few if tokens < FEW * rows else 0.0)
        return seconds + self._verifying(sums, drafting)

    def prefill(self, shares: Sequence[Share], drafting: bool) -> float:
        """Seconds of a forward of the target over rows that are read, and no others."""
        return self._verifying(list(map(sum, zip(*shares, strict=True))), drafting)

    def following(self, rows: Iterable[tuple[int, int]]) -> float:
        """Seconds in which the first draft reads rows, (tokens, context) each."""
        return self._draft[0].seconds(Work.of(rows))

    def beginning(self, read: int, entering: int) -> float:
        """Seconds that the engine adds when so many tokens of prompts are read and so many requests
        enter."""
        return self._engine.per_read * read + self._engine.per_entering * entering

    def _verifying(self, sums: Sequence[float], drafting: bool) -> float:
        tokens, candidates = sums[self._tokens : self._tokens + 2]
        kind = 2 if drafting else 1 if candidates else 0
        terms = self._kinds[kind]
        return terms.fixed + sums[self._columns[kind]] + _beyond(terms, tokens)

    def _verified(self, tokens: int, held: int, candidates: int = 0, added: float = 0.0) -> Share:
        pairs = tokens * (held + (tokens - 1) / 2)
        few = pairs if tokens < FEW else 0.0
        seconds = [
            added + row + token * tokens + cached * held + pair * pairs + few_pair * few
            for row, token, cached, pair, few_pair in self._of_target
        ]
        return tokens, candidates, *seconds


def _beyond(terms: ForwardTerms, tokens: float, forwards: float = 1) -> float:
    """Seconds of tokens beyond the knee of so many forwards together."""
    beyond = tokens - forwards * terms.knee
    return terms.per_token_beyond * beyond if beyond > 0 else 0.0
