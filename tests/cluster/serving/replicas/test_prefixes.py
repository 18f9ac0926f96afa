"""A request goes to the replica that holds its beginning, unless that is much busier."""

from __future__ import annotations

from itertools import count

from cluster.serving.replicas.prefixes import BLOCK, Choice, Prefixes

REPLICAS = ["a", "b", "c"]
KEYS = count()


def sent(prefixes: Prefixes, tokens: list[int], requests: int = 1) -> tuple[int, Choice]:
    """Send a text where it goes; returns its key and why."""
    key, choice = next(KEYS), prefixes.choose(tokens, REPLICAS)
    prefixes.reserve(key, choice.replicas[0], requests)
    prefixes.accepted(key, choice.replicas[0], requests, tokens)
    return key, choice


def test_new_texts_spread_over_the_replicas() -> None:
    prefixes = Prefixes(slots=4)
    texts = [[text] * 3 * BLOCK for text in range(6)]
    chosen = [sent(prefixes, text)[1] for text in texts]
    assert sorted(choice.replicas[0] for choice in chosen) == sorted(REPLICAS * 2)
    assert {choice.reason for choice in chosen} == {"load"}
    ended = Prefixes(slots=4)
    for text in texts:  # one after the other, too
        ended.ended(sent(ended, text)[0])
    assert len({ended.choose(text, REPLICAS).replicas[0] for text in texts}) == 3


def test_the_longest_common_beginning_wins_until_its_replica_is_much_busier() -> None:
    prefixes, text = Prefixes(slots=4), [*range(4 * BLOCK)]
    prefixes.accepted("short", "a", 1, text[: 2 * BLOCK])
    prefixes.accepted("long", "b", 1, text[: 3 * BLOCK])
    prefixes.ended("short")
    prefixes.ended("long")
    keys = []
    for _ in range(3):  # half a batch more than the others may have is two
        key, choice = sent(prefixes, text)
        keys.append(key)
        assert (choice.replicas[0], choice.reason) == ("b", "prefix")
    last, choice = sent(prefixes, text)
    assert (choice.replicas[0], choice.reason) == ("c", "busy")
    for key in (*keys, last):
        prefixes.ended(key)
    assert prefixes.choose(text, REPLICAS).replicas[0] in ("b", "c")  # both hold it now


def test_less_than_a_block_or_another_beginning_is_no_prefix() -> None:
    prefixes, text = Prefixes(slots=4), [*range(2 * BLOCK)]
    sent(prefixes, text)
    for other in (text[: BLOCK - 1], [99, *text], []):
        assert prefixes.choose(other, REPLICAS).reason == "load"


def test_a_replica_forgets_texts_as_its_slots_do_and_is_forgotten_itself() -> None:
    prefixes = Prefixes(slots=2)
    first, second, third = ([text] * BLOCK for text in range(3))
    for text in (first, second, third):
        prefixes.accepted(text[0], "a", 1, text)
        prefixes.ended(text[0])
    assert prefixes.choose(first, REPLICAS).reason == "load"
    assert prefixes.choose(third, REPLICAS).replicas[0] == "a"
    assert prefixes.choose(third, ["b", "c"]).reason == "load"


def test_a_submission_counts_with_all_its_requests_until_it_ends() -> None:
    prefixes = Prefixes(slots=4)
    key, choice = sent(prefixes, [1] * BLOCK, requests=3)
    assert prefixes.load() == {choice.replicas[0]: 3}
    prefixes.ended(key)
    assert not prefixes.load()
