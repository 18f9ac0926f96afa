from dataclasses import replace

import numpy as np
import pytest

from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.tokens.statistics import (
    Counts,
    Generation,
    Round,
    TokenOrigin,
    rounds_frame,
)

D, C, B = TokenOrigin.DRAFT, TokenOrigin.CORRECTION, TokenOrigin.BONUS


def round_of(position, drafted, accepted, generated):
    return Round(position, drafted, accepted, generated, drafted, 0.0, 0.0, 0.0)


def generation(request_id="a"):
    """Three rounds: all of 3 accepted, 1 of 3 accepted, and an end token as the last accepted."""
    return Generation(
        request_id=request_id,
        prompt_tokens=5,
        tokens=[1, 2, 3, 4, 5, 6, 7, 8],
        text="",
        origins=[D, D, D, B, D, C, D, D],
        rounds=[round_of(0, 3, 3, 4), round_of(4, 3, 1, 2), round_of(6, 4, 2, 2)],
        finish_reason="stop",
    )


class TestCounts:
    def test_forwards_and_tokens_are_summed_over_rounds_and_requests(self):
        assert Counts.of([generation("a"), generation("b")]) == Counts(
            requests=2,
            n=16,
            n_draft=20,
            n_target=6,
            n_discarded=8,
            n_drafted=20,
            n_accepted=12,
            n_target_tokens=4,
        )
        assert generation().counts == Counts.of([generation()])

    def test_draft_forwards_are_not_kept_for_the_tokens_of_a_lookup(self):
        """It found 5 tokens in one round; in the other the draft model wrote 2 of its 4."""
        mixed = replace(
            generation(),
            origins=[TokenOrigin.LOOKUP] * 5 + [C, D, D, C],
            rounds=[Round(0, 5, 5, 6, 0, 0.0, 0.0, 0.0), round_of(6, 4, 2, 3)],
        )
        counts = mixed.counts
        assert (counts.n_draft, counts.n_accepted, counts.n_draft_kept) == (4, 7, 2)
        replayed = ReplayedRounds.of_frame(rounds_frame([mixed]), ["a"])
        assert replayed.counts.as_dict() == counts.as_dict()

    def test_metrics_are_the_papers_rates(self):
        assert generation().counts.metrics() == pytest.approx(
            {
                "discard_rate": 4 / 8,
                "verification_rate": 3 / 8,
                "mat": 8 / 3,
                "acceptance_rate": 6 / 10,
                "utilisation": 8 / 10,
            }
        )
        assert all(np.isfinite(value) for value in Counts.of([]).metrics().values())


def test_rounds_frame_has_one_row_a_round_and_the_given_columns():
    frame = rounds_frame([generation("a"), generation("b")], config="x")
    assert list(frame["request_id"]) == ["a"] * 3 + ["b"] * 3
    assert list(frame["round"]) == [0, 1, 2] * 2
    assert set(frame["config"]) == {"x"}
    assert frame["accepted"].sum() == 12
