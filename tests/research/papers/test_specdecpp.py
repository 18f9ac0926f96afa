"""Thresholds of SpecDec++'s Table 3 are chosen on dev, and shown on what no head has seen."""

import re

import numpy as np
import pandas as pd
import pytest

from research.papers import specdecpp
from research.papers.sections.specdecpp import SPECDECPP
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadTrainingSettings
from specdec_core.recordings.replay import Replay
from specdec_core.training.heads.examples import split_prompts
from tests.specdec_core.cost.examples import constant_profile
from tests.specdec_core.recordings.test_record import record

SAMPLING = Sampling(temperature=1, top_k=50)
PROFILE = constant_profile(1.0, 0.2)


@pytest.fixture(scope="module")
def mixed(tiny_pair, tmp_path_factory):
    """Twelve prompts, of which two are in dev and two in test."""
    folder = tmp_path_factory.mktemp("mixed")
    return record(tiny_pair, folder, 12, mixing=0.15, sampling=SAMPLING, max_draft=20)


@pytest.fixture(scope="module")
def judged(tiny_pair, tmp_path_factory):
    """The same prompts and two more."""
    folder = tmp_path_factory.mktemp("judged")
    return record(tiny_pair, folder, 14, sampling=SAMPLING, max_draft=20)


@pytest.fixture(scope="module")
def table(mixed, judged):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specdecpp, "WEIGHTS", (6.0,))
        patch.setattr(specdecpp, "DEPTHS", (0, 3))
        patch.setattr(specdecpp, "SETTINGS", HeadTrainingSettings(epochs=1))
        return specdecpp.heads({"corpus": mixed}, {"more": judged, "same": mixed}, PROFILE)


def test_every_set_is_of_prompts_that_no_head_has_seen(table, mixed, judged):
    assert set(table["prompts"]) == {"dev", "test", "more"}  # of "same" all were learned from
    assert set(table["name"]) == {
        *("specdecpp-d0-w6", "specdecpp-d3-w6"),
        specdecpp.FIXED,
        specdecpp.PRODUCT,
    }
    split = split_prompts(mixed.prompts.first_turns)
    numbers = {"dev": split == 1, "test": split == 2, "more": np.arange(14) >= 12}
    fixed = table[table["name"] == specdecpp.FIXED]
    for name, inside in numbers.items():
        replay = Replay(judged if name == "more" else mixed, drawn=True)
        for k, policy in specdecpp.BASELINES[specdecpp.FIXED].items():
            [row] = fixed[(fixed["setting"] == k) & (fixed["prompts"] == name)].to_dict("records")
            drafter = DraftModelSettings(draft="draft", policy=policy)
            rounds = replay.run(Configuration(drafter=drafter, sampling=SAMPLING))
            mine = np.isin(rounds.prompt, np.flatnonzero(inside))
            seconds = mine.sum() + 0.2 * rounds.draft_forwards[mine].sum()
            assert row["speedup"] == pytest.approx(rounds.generated[mine].sum() / seconds)


def test_what_is_fastest_on_dev_is_shown_beside_each_sets_own_best():
    speeds = {"dev": (1.2, 1.5), "test": (1.4, 1.3), "code": (1.0, 1.1)}
    table = pd.DataFrame(
        {"name": "head", "prompts": prompts, "setting": h, "speedup": speedup}
        for prompts, pair in speeds.items()
        for h, speedup in zip((0.3, 0.7), pair, strict=True)
    )
    found = specdecpp.chosen_settings(table).set_index("prompts")
    assert list(found.loc["test", ["setting", "speedup", "best_setting", "best"]]) == [
        0.7, 1.3, 0.3, 1.4,
    ]  # fmt: skip
    assert list(found.loc["code", ["setting", "speedup", "best"]]) == [0.7, 1.1, 1.1]
    assert "dev" not in found.index


def test_a_head_stands_beside_the_papers_numbers(table: pd.DataFrame):
    [section] = [each for each in SPECDECPP if each.key == "specdecpp-3"]
    whole = section.section(table)
    assert re.search(r"measured reason: \d of 2 heads are fastest", whole.terms["Verdict"])
    shown = whole.shown
    assert shown is not None
    assert list(shown[""])[-2:] == [specdecpp.FIXED, specdecpp.PRODUCT]
    [row] = shown[(shown["w_rej"] == "6") & (shown["D"] == "3")].to_dict("records")
    assert row["paper: train / eval KL"] == "0.617 / 0.582"
    assert row["paper: tokens/s (h)"] == "18.80 (0.7), 20.47 (0.7), 20.95 (0.7)"


def test_each_model_is_timed_alone(mixed, monkeypatch):
    monkeypatch.setattr(specdecpp, "STEPS", (2, 6, 12))
    table = specdecpp.stand_alone({"code": mixed})
    assert table["model"].tolist() == ["target", "draft"]
    assert (table["decodings"] == 3 * specdecpp.MOST).all()
    known = table[table["refused"] == ""]
    assert (known["t_target"] > 0).all()
    [section] = [each for each in SPECDECPP if each.key == "specdecpp-2"]
    assert f"{2 - len(known)} fits refused" in section.section(table).terms["Verdict"]


def test_one_candidate_a_round_is_among_the_settings_of_a_head(table):
    wide = table.pivot(index=["name", "setting"], columns="prompts", values="speedup")
    for name in ("specdecpp-d0-w6", "specdecpp-d3-w6"):
        assert wide.loc[name, 0.0].tolist() == pytest.approx(wide.loc[specdecpp.FIXED, 1].tolist())
