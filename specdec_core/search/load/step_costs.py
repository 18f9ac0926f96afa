"""What the rounds of simulated requests do and cost, each computed once.

The seconds of a step are a sum over its rows, except for a forward's fixed part, for tokens beyond
its knee, and for the number of a draft's forwards, which is that of the row with the most. A row's
share of the sums is the same whenever the same request is in the same state, so it is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from specdec_core.cost.forward import FEW, Work
from specdec_core.cost.steps import StepTimes
from specdec_core.search.load.answers import Answers

_KNOWN = 2**17  # rounds that are kept

# What a row adds to a step. For each draft: its forwards, tokens fed, seconds, and further seconds
# where rows have few tokens. For the target: tokens fed, candidates, and the seconds by each of the
# terms that may apply (without candidates, with candidates). For each proposer that some
# rounds have and some have not: 1 in its rounds.
Share = tuple[float, ...]
_OF_DRAFT, _OF_TARGET = 4, 4


class RequestShape(NamedTuple):
    """The shape of a request: a recorded answer, after a prompt of `prompt_tokens` tokens, up to
    `most` tokens of it."""

    answer: int
    prompt_tokens: int
    most: int


class State(NamedTuple):
    """A request between two rounds: tokens `generated` in `rounds` rounds, and the tokens of its
    sequence in the cache of the target (`held`) and of each draft (`read`)."""

    generated: int
    rounds: int
    held: int
    read: tuple[int, ...]


class RoundCost(NamedTuple):
    """A round of a request: its candidates, its row's share of the step, and the state after it."""

    drafted: int
    share: Share
    after: State


class _Forward(NamedTuple):
    """Of a forward what does not depend on rows: the column of a share where it begins, the fixed
    seconds, the knee, and the seconds of each token beyond the knee."""

    column: int
    fixed: float
    knee: int
    per_token_beyond: float


class StepCosts:
    """What steps cost by `times` when requests are given `answers`. Raises :class:`UserError` for
    a draft of the answers without times."""

    def __init__(self, answers: Answers, times: StepTimes) -> None:
        self.answers, self.mixes = answers, times.mixes
        self.drafts = answers.drafts
        self.unread = (0,) * len(self.drafts)  # of a sequence that is in no draft's cache
        # Of several drafts each is lazy.
        self.reads_along = answers.draft is not None and not answers.lazy
        self.round = lru_cache(_KNOWN)(self._round)
        self._draft_terms = [times.draft(name) for name in self.drafts]
        self._target_terms = [times.autoregressive or times.target, times.target]
        self._tokens = _OF_DRAFT * len(self.drafts)  # the column of the target's tokens
        proposers = answers.proposers or {frozenset()}
        always, any_of = frozenset.intersection(*proposers), frozenset.union(*proposers)
        proposals = {key: s for key, s in times.proposals.items() if key in any_of and s}
        self._at_times = {key: s for key, s in proposals.items() if key not in always}
        # For each step; a field of a pydantic model takes several times as long.
        self._per_step = times.per_step + sum(s for key, s in proposals.items() if key in always)
        self._per_row = times.per_row
        self._proposing = [
            _Forward(_OF_DRAFT * n, terms.fixed, terms.knee, terms.per_token_beyond)
            for n, terms in enumerate(self._draft_terms)
        ]
        self._verifying = [
            _Forward(self._tokens + 2 + n, terms.fixed, terms.knee, terms.per_token_beyond)
            for n, terms in enumerate(self._target_terms)
        ]

    def prefill_share(self, tokens: int, held: int) -> Share:
        """The share of a row that prefills `tokens` tokens after the `held` ones in the cache."""
        no_proposers = (0.0,) * len(self._at_times)
        return (0.0,) * self._tokens + self._verified(tokens, held) + no_proposers

    def seconds(self, shares: Sequence[Share]) -> float:
        """Seconds of a step of rows with these shares."""
        columns = list(zip(*shares, strict=True))
        sums = list(map(sum, columns))
        seconds = self._per_step
        for first, fixed, knee, per_token_beyond in self._proposing:
            if forwards := max(columns[first]):
                rows, tokens, added, few = sums[first : first + _OF_DRAFT]
                seconds += forwards * fixed + added
                seconds += per_token_beyond * max(tokens - forwards * knee, 0)
                seconds += few if tokens < FEW * rows else 0.0
        proposing = sums[self._tokens + _OF_TARGET :]
        for rows, taken in zip(proposing, self._at_times.values(), strict=True):
            seconds += taken if rows else 0.0
        return seconds + self._verify(sums)

    def prefill(self, shares: Sequence[Share]) -> float:
        """Seconds of a forward of the target that only prefills rows."""
        return self._verify(list(map(sum, zip(*shares, strict=True))))

    def following(self, rows: Iterable[tuple[int, int]]) -> float:
        """Seconds in which the first draft prefills rows, (tokens, context) each."""
        return self._draft_terms[0].seconds(Work.of(rows))

    def _round(self, shape: RequestShape, least: int, state: State) -> RoundCost:
        """The next round of a request while at least `least` requests decode."""
        answer, prompt, most = shape
        left, answers = most - state.generated, self.answers
        each = answers.round(answer, state.generated, state.rounds, least)
        # Rounds of a whole recorded answer were drafted within its length.
        if each.drafted >= left and most != answers.lengths[answer]:
            each = each.within(left - 1)
        sequence, read = prompt + state.generated, list(state.read)
        share: list[float] = [0.0] * self._tokens
        if each.draft_forwards and (draft := each.draft or answers.draft) is not None:
            place = self.drafts.index(draft)
            before = read[place]
            # The first forward also prefills what is missing of the sequence, at least its last
            # token.
            tokens, forwards = each.draft_tokens + sequence - before - 1, each.draft_forwards
            context = before + forwards // 2
            work = Work(forwards, tokens, forwards * context, tokens * context)
            terms, first = self._draft_terms[place], _OF_DRAFT * place
            few = terms.per_few_pair * work.pairs
            share[first : first + _OF_DRAFT] = forwards, tokens, terms.of_rows(work), few
            read[place] = sequence - 1 + min(each.generated, each.depth)
        fed = sequence - state.held + each.drafted
        verified = self._verified(fed, state.held, each.drafted, self._per_row)
        proposing = (float(key in each.proposers) for key in self._at_times)
        generated = state.generated + each.generated
        after = State(generated, state.rounds + 1, prompt + generated - 1, tuple(read))
        return RoundCost(each.drafted, (*share, *verified, *proposing), after)

    def _verified(self, tokens: int, held: int, candidates: int = 0, added: float = 0.0) -> Share:
        work = Work.of([(tokens, held)])
        by_terms = (added + terms.of_rows(work) for terms in self._target_terms)
        return (tokens, candidates, *by_terms)

    def _verify(self, sums: Sequence[float]) -> float:
        """Seconds of the target's forward over rows with these sums of shares."""
        candidates = sums[self._tokens + 1] > 0
        column, fixed, knee, per_token_beyond = self._verifying[candidates]
        beyond = max(sums[self._tokens] - knee, 0)
        return fixed + sums[column] + per_token_beyond * beyond
