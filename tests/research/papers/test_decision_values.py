"""Decision models are judged on candidates that they have not seen, by what became of them."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from research.papers.decision_values import DecisionValues, judged
from research.papers.sections.mcsd import MCSD
from specdec_core.drafting.heads.card import HeadTrainingSettings
from specdec_core.training.heads.examples import TEST
from tests.specdec_core.drafting.heads.examples import learnable

SETTINGS = HeadTrainingSettings(learning_rate=3e-2, batch_size=128, epochs=4)


def test_a_rule_that_can_be_learned_parts_the_outcomes_and_noise_does_not():
    examples = learnable("t2")
    shuffled = np.random.default_rng(0).permutation(examples.labels)
    learned = judged(examples, SETTINGS)
    noise = judged(replace(examples, labels=shuffled), SETTINGS)
    assert len(learned.values) == (examples.split == TEST).sum()
    assert learned.auc > 0.8 > 0.6 > noise.auc
    assert learned.overlap < noise.overlap


def test_shares_and_errors_follow_from_values_and_outcomes():
    values, accepted = np.array([0.1, 0.3, 0.5, 0.96, 0.96]), np.array([0.0, 1.0, 0.0, 1.0, 1.0])
    found = DecisionValues("t1", "draft", 9, values, accepted)
    assert found.stopped == pytest.approx(1 / 3)
    assert found.passed == pytest.approx(1 / 2)
    assert found.overlap == 0
    assert found.auc == pytest.approx(5 / 6)
    shares = found.shares()
    assert shares["accepted"].iloc[19] == pytest.approx(2 / 3)
    assert shares[["accepted", "rejected"]].sum().tolist() == pytest.approx([1, 1])
    assert np.isnan(replace(found, accepted=np.ones(5)).passed)
    # Under sampling a candidate is accepted with a probability, and counts on both sides.
    half = replace(found, values=np.array([0.2, 0.6]), accepted=np.array([0.5, 0.5]))
    assert (half.stopped, half.passed) == (0.5, 0.5)
    assert half.overlap == pytest.approx(1)


def test_the_section_has_the_first_models_overlap():
    table = pd.DataFrame(
        {
            "kind": "t1", "draft": "small", "trained": 99,
            "value": [0.1, 0.9, 0.9], "accepted": [0.0, 0.0, 1.0],
        }
    )  # fmt: skip
    [section] = [each for each in MCSD if each.key == "mcsd-f7"]
    shown = section.section(table)
    assert "T1 has AUC 0.75" in shown.terms["Verdict"]
    assert "overlap by 50%" in shown.terms["Verdict"]
    ElementTree.fromstring(shown.svg)
