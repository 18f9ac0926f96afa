"""Reports say in words what the configurations do that they name, bandits' arms included."""

from dashboards.reports.sentences import sentences
from specdec_core.config import Configuration

CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 4}}
LOOKUP = {"kind": "prompt_lookup"}


def configuration(drafter):
    return Configuration.model_validate({"drafter": drafter})


def test_a_bandits_arms_have_a_line_each_and_no_arm_has_two():
    chain = configuration(CHAIN)
    bandits = [
        configuration({"kind": "bandit", "rule": rule, "arms": [CHAIN, LOOKUP]})
        for rule in ("ucb", "exp3")
    ]
    section = sentences([("K", chain), ("UCB", bandits[0]), ("EXP3", bandits[1])])
    assert section.lines == [
        f"K: {chain.sentence}",
        f"UCB: {bandits[0].sentence}",
        f"arm prompt lookup 3/10: {configuration(LOOKUP).sentence}",
        f"EXP3: {bandits[1].sentence}",
    ]


def test_a_configuration_shown_twice_has_one_line():
    chain = configuration(CHAIN)
    assert len(sentences([("K", chain), ("K", chain)]).lines) == 1
