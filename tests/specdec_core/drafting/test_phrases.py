"""The phrase pool keeps its limits, forgets in the right order and makes nothing up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec_core.drafting.phrases import PhrasePool

TOKENS = st.integers(0, 4)
PHRASES = st.lists(TOKENS, min_size=1, max_size=4).map(tuple)
INSERTS = st.tuples(TOKENS, PHRASES)
LOOKUPS = st.tuples(TOKENS, st.integers(0, 4))
OPERATIONS = st.lists(st.one_of(INSERTS, LOOKUPS), max_size=80)


class SlowPool:
    """The same rules, read off a list of everything that happened."""

    def __init__(self, keys: int, per_key: int) -> None:
        self.keys, self.per_key = keys, per_key
        self.stacks: dict[int, list[tuple[int, ...]]] = {}
        self.uses: dict[int, list[int]] = {}
        self.clock = 0

    def insert(self, key: int, phrase: tuple[int, ...]) -> None:
        self.clock += 1
        if key not in self.stacks:
            if len(self.stacks) == self.keys:
                least = min(self.stacks, key=lambda k: (len(self.uses[k]), self.uses[k][-1]))
                del self.stacks[least], self.uses[least]
            self.stacks[key], self.uses[key] = [], [self.clock]
        stack = self.stacks[key]
        longer = [known for known in stack if known[: len(phrase)] == phrase]
        phrase = longer[-1] if longer else phrase
        kept = [known for known in stack if known != phrase[: len(known)]]
        self.stacks[key] = [*kept, phrase][-self.per_key :]

    def lookup(self, key: int, count: int) -> list[tuple[int, ...]]:
        self.clock += 1
        if key not in self.stacks or count == 0:
            return []
        self.uses[key].append(self.clock)
        return self.stacks[key][::-1][:count]


@given(OPERATIONS, st.integers(1, 4), st.integers(1, 4))
def test_the_pool_does_what_the_slow_one_does(
    operations: list[tuple[int, object]], keys: int, per_key: int
) -> None:
    pool, slow = PhrasePool(keys, per_key), SlowPool(keys, per_key)
    for key, what in operations:
        if isinstance(what, tuple):
            pool.insert(key, what)
            slow.insert(key, what)
        else:
            assert pool.lookup(key, what) == slow.lookup(key, what)
    assert len(pool) == len(slow.stacks)


@given(OPERATIONS, st.integers(1, 3), st.integers(1, 3))
def test_limits_are_never_exceeded_and_every_phrase_was_inserted(
    operations: list[tuple[int, object]], keys: int, per_key: int
) -> None:
    pool = PhrasePool(keys, per_key)
    inserted = set()
    for key, what in operations:
        if isinstance(what, tuple):
            pool.insert(key, what)
            inserted.add((key, what))
            assert pool.lookup(key, 1)[0][: len(what)] == what
        else:
            found = pool.lookup(key, 100)
            assert len(found) <= per_key
            assert len(set(found)) == len(found)
            assert {(key, phrase) for phrase in found} <= inserted
            assert not any(a != b and b[: len(a)] == a for a in found for b in found)
        assert len(pool) <= keys


def test_a_full_stack_forgets_its_earliest_phrase() -> None:
    pool = PhrasePool(keys=1, per_key=3)
    for token in (1, 2, 3, 1, 4):
        pool.insert(0, (token,))
    assert pool.lookup(0, 9) == [(4,), (1,), (3,)]


def test_a_full_pool_forgets_the_key_that_was_looked_up_least() -> None:
    pool = PhrasePool(keys=3, per_key=2)
    for key in (1, 2, 3):
        pool.insert(key, (key, key))
    for key in (1, 1, 3, 2):
        pool.lookup(key, 1)
    pool.insert(4, (4, 4))
    assert [len(pool.lookup(key, 1)) for key in (1, 2, 3, 4)] == [1, 1, 0, 1]


def test_a_phrase_that_is_known_to_go_on_stays_whole() -> None:
    pool = PhrasePool(keys=1, per_key=2)
    pool.insert(0, (1, 2, 3))
    pool.insert(0, (5,))
    pool.insert(0, (1, 2))
    assert pool.lookup(0, 2) == [(1, 2, 3), (5,)]
    pool.insert(0, (5, 6))
    assert pool.lookup(0, 2) == [(5, 6), (1, 2, 3)]
