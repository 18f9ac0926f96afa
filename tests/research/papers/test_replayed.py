"""Sections of several papers say what the studies behind them say of the same recordings."""

import math

import pandas as pd
import pytest

from research.papers import replayed
from research.papers.sections import verdicts
from research.papers.sections.replayed import REPLAYED
from research.papers.studies import OWN_HEADS, PAIR, TIMES
from specdec_core.config import Configuration, parse
from specdec_core.recordings.replay import Replay
from tests.conftest import save_random_head
from tests.research.papers.exhibits import drawn
from tests.specdec_core.cost.examples import constant_profile
from tests.specdec_core.recordings.test_record import record

PROFILE = constant_profile(1.0, 0.1)


@pytest.fixture(scope="module")
def greedy(tiny_pair, tmp_path_factory):
    return {"code": record(tiny_pair, tmp_path_factory.mktemp("greedy"), max_draft=40)}


def test_no_policy_beats_the_oracle_and_heads_of_other_pairs_are_left_out(greedy):
    others = {"other": "bundled:small-specdecpp-d3-w1"}
    table = replayed.policies(greedy, PROFILE, others).set_index("family")
    assert set(table.index) == {"fixed", "confidence_product", "svip", "oracle"}
    assert table["speedup"].idxmax() == "oracle"
    assert table.loc["oracle", "discard_rate"] == 0
    assert table.loc["fixed", "over_fixed"] == 0


def test_each_head_is_a_family_of_its_own(tiny_pair, tmp_path):
    prints = dict(tiny_pair.fingerprints)
    sets = {"code": record(tiny_pair, tmp_path / "own", max_draft=40, fingerprints=prints)}
    heads = {}
    for kind in ("specdecpp", "t2", "joint"):
        save_random_head(tiny_pair, kind, tmp_path / kind)
        heads[f"own {kind}"] = str(tmp_path / kind)
    table = replayed.policies(sets, PROFILE, heads).set_index("family")
    assert set(heads) < set(table.index)
    counts = len(replayed.THRESHOLDS)
    assert table.loc[list(heads), "tried"].tolist() == [counts, 2 * counts, 2 * counts]
    assert table["speedup"].idxmax() == "oracle"
    assert table["speedup"].is_monotonic_decreasing
    over = table["speedup"] / table.loc["fixed", "speedup"] - 1
    assert table["over_fixed"].tolist() == pytest.approx(over.tolist())


def test_regret_is_against_the_arm_with_the_fewest_rounds(greedy):
    table = replayed.regret(greedy, PROFILE)
    assert list(table["kind"]) == ["arm"] * len(replayed.ARMS) + ["bandit"] * 4
    assert list(table["name"][-4:]) == list(replayed.BANDITS)
    arms = table[table["kind"] == "arm"]
    best = arms["mat"].idxmax()
    assert arms.loc[best, "regret_rounds"] == 0
    assert (arms["regret_rounds"] >= 0).all()
    assert (table["each_rounds"] >= table["regret_rounds"]).all()
    tokens = sum(map(len, greedy["code"].prompts.outputs))
    assert arms.loc[best, "best_rounds"] == pytest.approx(tokens / arms.loc[best, "mat"])


def test_bounds_add_up_over_prompts_for_bandits_that_the_theorems_cover(greedy):
    table = replayed.regret(greedy, PROFILE).set_index("name")
    assert list(table.index[table["bound"].notna()]) == ["EXP3Spec", "UCBSpec"]
    replay = Replay(greedy["code"], hidden=False)
    arms = [{**arm, "draft": "draft"} if "policy" in arm else arm for arm in replayed.ARMS]
    runs = [replay.run(parse(Configuration, {"drafter": arm}, "arm")) for arm in arms]
    longest = max(run.drafted.max() for run in runs)
    exp3, ucb = 0.0, 0.0
    for prompt, output in enumerate(greedy["code"].prompts.outputs):
        rounds = [int((run.prompt == prompt).sum()) for run in runs]
        means = [len(output) / n for n in rounds]
        exp3 += longest * math.sqrt(min(rounds) * len(runs) * math.log(len(runs)))
        hardness = sum(1 / (max(means) * (max(means) - m)) for m in means if m < max(means))
        ucb += hardness * longest**2 * math.log(len(output))
    assert table.loc["EXP3Spec", "bound"] == pytest.approx(exp3)
    assert table.loc["UCBSpec", "bound"] == pytest.approx(ucb)


@pytest.mark.parametrize(
    ("low", "said"), [(0.8, "Does not hold"), (0.9, "Does not hold"), (0.96, "Holds here")]
)
def test_noise_puts_no_bandit_beside_the_best_length(low, said):
    arm = {"kind": "arm", "name": "γ = 1", "over_best": 1.0, "low": 1.0, "high": 1.0}
    bandit = {"kind": "bandit", "name": "UCBSpec", "over_best": 0.98, "low": low, "high": 1.2}
    counts = {"tokens_per_second": 9.0, "regret_rounds": 1.0, "mat": 2.0}
    table = pd.DataFrame([arm | counts, bandit | counts])
    assert verdicts.banditspec_batch(table).startswith(said)


def test_every_section_is_drawn_from_its_table(greedy, tiny_spec):
    drawn(REPLAYED, {"greedy": greedy, TIMES: PROFILE, PAIR: tiny_spec, OWN_HEADS: {}})
