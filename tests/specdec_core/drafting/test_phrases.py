"""The phrase pool keeps its limits, forgets in the right order and makes nothing up."""

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

    def __init__(self, keys, per_key):
        self.keys, self.per_key = keys, per_key
        self.stacks: dict[int, list[tuple[int, ...]]] = {}
        self.uses: dict[int, list[int]] = {}
        self.clock = 0

    def insert(self, key, phrase):
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

    def lookup(self, key, count):
        self.clock += 1
        if key not in self.stacks or count == 0:
            return []
        self.uses[key].append(self.clock)
        return self.stacks[key][::-1][:count]


@given(OPERATIONS, st.integers(1, 4), st.integers(1, 4))
def test_the_pool_does_what_the_slow_one_does(operations, keys, per_key):
    pool, slow = PhrasePool(keys, per_key), SlowPool(keys, per_key)
    for key, what in operations:
        if isinstance(what, tuple):
            pool.insert(key, what)
            slow.insert(key, what)
        else:
            assert pool.lookup(key, what) == slow.lookup(key, what)
    assert len(pool) == len(slow.stacks)
