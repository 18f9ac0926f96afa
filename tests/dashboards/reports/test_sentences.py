"""Reports say in words what the configurations do that they name, bandits' arms included."""

from dashboards.reports.sentences import sentences
from tests.configurations import FOUR, LOOKUP
from tests.specdec_core.kinds import configured


def test_a_bandits_arms_have_a_line_each_and_no_arm_has_two():
    arms = [FOUR.drafter, LOOKUP.drafter]
    bandits = [configured({"kind": "bandit", "rule": r, "arms": arms}) for r in ("ucb", "exp3")]
    section = sentences([("K", FOUR), ("UCB", bandits[0]), ("EXP3", bandits[1])])
    assert section.lines == [
        f"K: {FOUR.sentence}",
        f"UCB: {bandits[0].sentence}",
        f"arm prompt lookup 3/10: {LOOKUP.sentence}",
        f"EXP3: {bandits[1].sentence}",
    ]


def test_a_configuration_shown_twice_has_one_line():
    assert len(sentences([("K", FOUR), ("K", FOUR)]).lines) == 1
