"""How contestants take turns, and on which requests the best is chosen and compared."""

from itertools import pairwise

import pytest

from specdec_core.measure.comparison import LEAST_HALF, halves, interleaved


@pytest.mark.parametrize("sets", [2, 3, 4])
def test_both_halves_have_prompts_of_every_set_of_a_mixture(sets):
    """They take turns in a mixture: of two, every other request is all of one."""
    for half in halves(96):
        counts = [sum(n % sets == each for n in half) for each in range(sets)]
        assert min(counts) > 96 / sets / 6


@pytest.mark.parametrize("requests", [2 * LEAST_HALF, 2 * LEAST_HALF + 1, 24])
def test_halves_share_no_request_and_are_of_one_size(requests):
    choose, report = halves(requests)
    assert sorted(choose + report) == list(range(requests))
    assert len(choose) - len(report) in (0, 1)
    assert halves(requests) == (choose, report)


def test_too_few_requests_are_not_divided():
    few = 2 * LEAST_HALF - 1
    assert halves(few) == (list(range(few)), list(range(few)))


def test_a_contestant_runs_after_each_other_one():
    """Each time after the same one, it would find what that left in the caches."""
    turns = [interleaved("abcd", turn) for turn in range(96)]
    assert all(sorted(turn) == [*"abcd"] for turn in turns)
    assert len({pair for turn in turns for pair in pairwise(turn)}) == 12
    # With 48 prompts: in another repeat a prompt has another order.
    assert any(turns[prompt] != turns[prompt + 48] for prompt in range(48))
    assert interleaved("abcd", 7) == turns[7]  # a race that goes on has the same order
