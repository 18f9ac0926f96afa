"""How contestants take turns, and on which requests the best is chosen and timed."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from specdec_core.measure.comparison import FOLDS, Crossed, folds, interleaved


@pytest.mark.parametrize("sets", [2, 3, 4])
def test_each_part_has_prompts_of_every_set_of_a_mixture(sets):
    """They take turns in a mixture: of two, every sixth request is all of one."""
    for fold in folds(96):
        counts = [sum(n % sets == each for n in fold.time) for each in range(sets)]
        assert min(counts) > 0


@pytest.mark.parametrize("requests", [2, FOLDS, FOLDS + 1, 24])
def test_no_request_is_timed_with_what_was_chosen_on_it(requests):
    found = folds(requests)
    assert len(found) == FOLDS
    everything = [*range(requests)]
    assert sorted(n for fold in found for n in fold.time) == everything
    for fold in found:
        assert sorted(fold.choose + fold.time) == everything
        assert len(fold.time) in {requests // FOLDS, -(-requests // FOLDS)}
    assert folds(requests) == found


def test_a_single_request_is_chosen_and_timed_on():
    assert [fold.choose for fold in folds(1)] == [[0]] * FOLDS


def test_each_part_has_the_times_of_what_was_chosen_without_it():
    rows = [SimpleNamespace(paces=lambda at, n=n: np.full((2 + n % 2, 12), n)) for n in range(6)]
    paces = Crossed(rows).paces()
    assert len(paces) == 2  # runs that all of them had
    for number, fold in enumerate(folds(12)):
        assert (paces[:, fold.time] == number).all()


def test_a_contestant_runs_after_each_other_one():
    """Each time after the same one, it would find what that left in the caches."""
    turns = [interleaved("abcd", turn) for turn in range(96)]
    assert all(sorted(turn) == [*"abcd"] for turn in turns)
    assert len({pair for turn in turns for pair in pairwise(turn)}) == 12
    # With 48 prompts: in another repeat a prompt has another order.
    assert any(turns[prompt] != turns[prompt + 48] for prompt in range(48))
    assert interleaved("abcd", 7) == turns[7]  # a race that goes on has the same order
