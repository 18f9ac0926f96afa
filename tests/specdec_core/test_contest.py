"""The contest times everybody alike, and everybody writes the target's greedy text."""

from __future__ import annotations

import pytest

from specdec_core.config import Configuration, DraftModelDrafter, PairSpec
from specdec_core.contest import contest_frame, contestants, race
from specdec_core.pair import Pair, load_pair

CHAIN = Configuration(drafter=DraftModelDrafter())


@pytest.fixture(scope="module")
def plain_pair(tiny_spec: PairSpec) -> Pair:
    runner = tiny_spec.runner.model_copy(update={"pack": False})
    return load_pair(tiny_spec.model_copy(update={"runner": runner}))


def test_all_contestants_decode_every_prompt_and_agree_in_float32(
    tiny_pair: Pair, plain_pair: Pair
) -> None:
    prompts = [tuple(range(5, 5 + n)) for n in (4, 11, 18)]
    runners = contestants(tiny_pair, plain_pair, [CHAIN], 12)
    turns = []
    race(runners, prompts, repeats=2, on_turn=lambda: turns.append(1))
    assert len(turns) == 6
    for runner in runners:
        assert runner.seconds_per_token.shape == (2, 3)
        assert runner.differing(runners[0]) == 0, runner.label
    frame = contest_frame(runners)
    assert len(frame) == len(runners) * 6
    assert (frame.groupby("contestant").size() == 6).all()


def test_a_different_output_is_counted(tiny_pair: Pair, plain_pair: Pair) -> None:
    prompts = [tuple(range(5, 5 + n)) for n in (4, 11)]
    runners = contestants(tiny_pair, plain_pair, [], 8)
    race(runners, prompts, repeats=1)
    runners[1].outputs[0] = [0, *runners[1].outputs[0][1:]]
    assert runners[1].differing(runners[0]) == 1
