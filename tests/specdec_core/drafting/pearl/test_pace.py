"""How long to wait for candidates, and what a trace shows of it."""

import pytest

from specdec_core.drafting.pearl.pace import DraftPace


def pace(t_draft, t_target, acceptance, t_notice=0.0):
    found = DraftPace(12)
    found.t_draft.add(t_draft)
    found.t_target.add(t_target)
    found.waited(0, t_notice)
    found.acceptance.value = acceptance
    return found


def test_one_waits_for_cheap_candidates_that_are_likely_accepted():
    assert pace(0.1, 4.0, 0.8).wait() > pace(0.5, 4.0, 0.8).wait() > 0
    assert pace(0.5, 4.0, 0.02).wait() == 0
    assert pace(3.0, 4.0, 0.8).wait() == 0
    assert pace(0.5, 4.0, 0.8, t_notice=8.0).wait() == 0
    assert DraftPace(12).wait() == 12  # nothing was seen yet


def test_rates_are_those_of_the_rounds_written_out():
    # A draft as slow as the target: one candidate comes during a round. Without waiting a round
    # after a rejection feeds none and adds 1 token; any other round feeds one and adds 1 + α.
    alpha = 0.5
    behind = (1 - alpha**2) / (1 - alpha**2 + alpha)
    expected = (behind * 1 + (1 - behind) * (1 + alpha)) / 2.0
    assert pace(2.0, 2.0, alpha).rate(0) == pytest.approx(expected)


def test_acceptance_and_times_are_what_was_seen():
    found = DraftPace(12)
    for _ in range(2000):
        found.judged(3, rejected=True)
        found.t_draft.add(0.25)
        found.t_target.add(4.0)
        found.waited(2, 1.5)
    assert found.acceptance.value == pytest.approx(0.75, abs=0.02)
    times = [mean.value for mean in (found.t_draft, found.t_target, found.t_notice)]
    assert times == pytest.approx([0.25, 4.0, 1.0])
