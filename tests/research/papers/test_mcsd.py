"""Decision models are judged on candidates that they have not seen, by what became of them; quality
by width is that of texts written for the recorded prompts."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from research.papers import mcsd
from research.papers.mcsd import DecisionValues, train_and_judge
from research.papers.sections.mcsd import MCSD
from specdec_core.drafting.heads.card import HeadTrainingSettings
from specdec_core.training.heads.examples import TEST
from tests.specdec_core.drafting.heads.examples import learnable
from tests.specdec_core.recordings.test_record import record

SETTINGS = HeadTrainingSettings(learning_rate=3e-2, batch_size=128, epochs=4)


def test_a_rule_that_can_be_learned_parts_the_outcomes_and_noise_does_not():
    examples = learnable("t2")
    shuffled = np.random.default_rng(0).permutation(examples.labels)
    learned = train_and_judge(examples, SETTINGS)
    noise = train_and_judge(replace(examples, labels=shuffled), SETTINGS)
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


def test_every_width_is_held_against_the_targets_own_texts(
    tiny_pair, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(mcsd, "LONGEST", 6)
    sets = {
        name: record(tiny_pair, tmp_path_factory.mktemp(name), prompts=prompts)
        for name, prompts in (("code", 2), ("chat", 6))
    }
    [section] = [each for each in MCSD if each.key == "mcsd-1"]
    table = section.measure(sets)
    assert list(table["width"]) == [0, *mcsd.WIDTHS]
    assert list(table["lossless"]) == [True, True, False, False]
    most = 6 * mcsd.TEXTS * (2 + mcsd.MOST)  # MOST of the six
    assert most / 2 < table["tokens"].max() <= most
    shown = section.section(table).shown
    assert shown is not None
    assert len(shown) == 4
    assert "width 1, which is lossless" in section.verdict(table)
