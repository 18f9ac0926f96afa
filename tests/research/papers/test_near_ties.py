"""A greedy output that differs by more than rounding is a fault."""

import torch

from research.papers.near_ties import FirstDifference, logit_gap, shared
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch


def test_the_first_difference_is_behind_what_outputs_share():
    assert shared([1, 2, 3], [1, 2, 4, 5]) == 2
    assert shared([1, 2], [1, 2, 4]) == 2


def test_a_planted_difference_is_a_fault_and_a_tie_is_none(tiny_pair: Pair):
    runner, tokens = tiny_pair.open_runner(None, 1), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    logits = runner.forward(Batch([0], [tokens], wanted=[1])).logits[-1].float()
    best, worst = int(logits.argmax()), int(logits.argmin())
    gap, rounding = logit_gap(runner, tokens, best, worst)
    torch.testing.assert_close(gap, float(logits.max() - logits.min()), rtol=1e-3, atol=1e-3)
    assert 0 < rounding < 1e-3  # float32
    place = {"config_id": "x", "prompts": "code", "prompt": 0, "position": 3}
    assert FirstDifference(**place, gap=gap, rounding=rounding).fault
    assert not FirstDifference(**place, gap=rounding, rounding=rounding).fault
