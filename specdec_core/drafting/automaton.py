"""A suffix automaton of sequences: every phrase in them, how often it occurs and what follows it
most often (Blumer et al., 1985; here built online and over several sequences)."""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0  # the state of the empty phrase


class SuffixAutomaton:
    """Every phrase of the sequences in at most two states a token.

    The phrases of a state are suffixes of each other and end at the same places. State s holds
    phrases of more than `length[link[s]]` and at most `length[s]` tokens. `follows[s]` maps a token
    to the state of the phrases extended by it. `count[s]` is the number of places, and `best[s]`
    the token that follows most often, of equals the one that followed last (-1: none yet).

    A token costs amortised constant time, and a step for each distinct count among the suffixes of
    the sequence: few, unless the sequence loops.
    """

    def __init__(self) -> None:
        self.follows: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.best = [-1], [0], [0], [-1]
        self.last = ROOT  # the state of the whole sequence so far
        self.tokens = 0  # of all sequences

    def begin(self) -> None:
        """Start another sequence. No phrase spans two sequences."""
        self.last = ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the sequence."""
        for token in tokens:
            self._append(token)

    def walk(self, state: int, matched: int, tokens: Iterable[int]) -> tuple[int, int]:
        """The longest suffix in the sequences of a phrase, of `matched` tokens in `state`, extended
        by `tokens`: its state and length."""
        follows = self.follows
        for token in tokens:
            while state >= 0 and token not in follows[state]:
                state = self.link[state]
                matched = self.length[state] if state >= 0 else -1
            state, matched = follows[state][token] if state >= 0 else ROOT, matched + 1
        return state, matched

    def followed(self, state: int, matched: int, tokens: Iterable[int]) -> tuple[int, int]:
        """The longest suffix of the extended phrase that something follows: its state and
        length."""
        state, matched = self.walk(state, matched, tokens)
        best = self.best
        while state > 0 and best[state] < 0:
            state = self.link[state]
            matched = self.length[state]
        return state, matched

    def continuation(self, state: int, most: int) -> list[int]:
        """The most frequent continuation of the phrases of `state`, at most `most` tokens."""
        follows, best = self.follows, self.best
        tokens: list[int] = []
        while len(tokens) < most and best[state] >= 0:
            tokens.append(best[state])
            state = follows[state][best[state]]
        return tokens

    def _append(self, token: int) -> None:
        before, self.last = self.last, self._grow(token)
        self.tokens += 1
        # Every suffix of the sequence before has been followed by `token` once more.
        follows, count, best, link = self.follows, self.count, self.best, self.link
        counted, state = -1, before
        while state >= 0:
            following = follows[state]
            longer = following[token]
            if longer != counted:
                count[longer] += 1
                counted = longer
            if best[state] < 0 or count[longer] >= count[following[best[state]]]:
                best[state] = token
            state = link[state]

    def _grow(self, token: int) -> int:
        """The state of the sequence extended by `token`, created where it is missing."""
        follows, link, length = self.follows, self.link, self.length
        state = self.last
        if token in follows[state]:  # an earlier sequence had all of this one
            known = follows[state][token]
            exact = length[known] == length[state] + 1
            return known if exact else self._split(state, token, known)
        new = self._state({}, length[state] + 1, ROOT, 0, -1)
        while state >= 0 and token not in follows[state]:
            follows[state][token] = new
            state = link[state]
        if state >= 0:
            known = follows[state][token]
            exact = length[known] == length[state] + 1
            link[new] = known if exact else self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, known: int) -> int:
        """Move some phrases of `known` to a new state: the phrases no longer than the longest of
        `state` extended by `token`. From now on they end at more places than the longer ones."""
        follows, link = self.follows, self.link
        shorter = self._state(
            dict(follows[known]),
            self.length[state] + 1,
            link[known],
            self.count[known],
            self.best[known],
        )
        link[known] = shorter
        while state >= 0 and follows[state].get(token) == known:
            follows[state][token] = shorter
            state = link[state]
        return shorter

    def _state(self, follows: dict[int, int], length: int, link: int, count: int, best: int) -> int:
        self.follows.append(follows)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.best.append(best)
        return len(self.link) - 1
