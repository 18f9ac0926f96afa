"""A request goes to the replica that holds its beginning, unless that is much busier."""

from collections import Counter

from cluster.serving.prefixes import BLOCK, Prefixes

IDLE = dict.fromkeys("abc", 0)


def sent(prefixes, tokens, load=None):
    """Send a sequence to its replica."""
    choice = prefixes.choose(tokens, load or IDLE)
    prefixes.sent(choice.replicas[0], tokens)
    return choice


def test_new_sequences_spread_over_the_replicas():
    prefixes = Prefixes(slots=4)
    chosen = [sent(prefixes, [number] * 3 * BLOCK) for number in range(6)]
    assert Counter(choice.replicas[0] for choice in chosen) == dict.fromkeys("abc", 2)
    assert {choice.reason for choice in chosen} == {"load"}
    assert sent(prefixes, [7], {"a": 1, "b": 0, "c": 2}).replicas == ["b", "a", "c"]


def test_the_longest_common_beginning_wins_until_its_replica_is_much_busier():
    prefixes, sequence = Prefixes(slots=4), [*range(4 * BLOCK)]
    prefixes.sent("a", sequence[: 2 * BLOCK])
    prefixes.sent("b", sequence[: 3 * BLOCK])
    for busy in range(3):  # it may have half a batch more than the others
        assert prefixes.choose(sequence, {**IDLE, "b": busy}) == (["b", "c", "a"], "prefix")
    assert prefixes.choose(sequence, {**IDLE, "b": 3}) == (["c", "a", "b"], "busy")


def test_less_than_a_block_or_another_beginning_is_no_prefix():
    prefixes, sequence = Prefixes(slots=4), [*range(2 * BLOCK)]
    sent(prefixes, sequence)
    for other in (sequence[: BLOCK - 1], [99, *sequence], []):
        assert prefixes.choose(other, IDLE).reason == "load"


def test_a_replica_forgets_sequences_as_its_slots_do_and_is_forgotten_itself():
    prefixes = Prefixes(slots=2)
    first, second, third = ([number] * BLOCK for number in range(3))
    for sequence in (first, second, third):
        prefixes.sent("a", sequence)
    assert prefixes.choose(first, IDLE).reason == "load"
    assert prefixes.choose(third, IDLE).replicas[0] == "a"
    assert prefixes.choose(third, {"b": 0, "c": 0}).reason == "load"
