"""The comparison chooses the fastest, and charges a choice for what it loses elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from research.policies.judging import judging_prompts
from research.policies.report import verdicts
from research.policies.study import (
    ADAPTIVE,
    ComparedPolicy,
    against_product,
    best_of_families,
    everything,
    transfers,
)
from specdec_core.config import Configuration, PolicySettings
from specdec_core.cost import ForwardCost, Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings, ConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.oracle import OracleSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.search.results import Trial
from specdec_core.tokens.statistics import Counts

PROFILE = Profile(
    target=ForwardCost.constant(1.0),
    drafts={"d": ForwardCost.constant(0.1)},
    device="far",
    target_dtype="unknown",
    draft_dtype="unknown",
)


def trial(policy: PolicySettings | None, n_draft: int, n_target: int) -> Trial:
    """Of 100 tokens."""
    drafter = DraftModelSettings(draft="d", policy=policy) if policy else PromptLookupSettings()
    accepted = 100 - n_target
    counts = Counts(
        requests=1, n=100, n_draft=n_draft, n_target=n_target, n_drafted=n_draft,
        n_discarded=n_draft - accepted, n_accepted=accepted, n_target_tokens=n_target,
    )  # fmt: skip
    return Trial.of(Configuration(drafter=drafter), counts, PROFILE, context=10, replayed=True)


FIXED, LONGER = FixedSettings(max_tokens=3), FixedSettings(max_tokens=6)
SURE, SURER = ConfidenceSettings(threshold=0.4), ConfidenceSettings(threshold=0.6)
SVIP, ORACLE = SvipSettings(), OracleSettings()


@pytest.fixture
def one() -> ComparedPolicy:
    trials = [
        trial(FIXED, 150, 40),  # 55 s
        trial(LONGER, 240, 36),  # 60 s
        trial(SURE, 140, 36),  # 50 s
        trial(SURER, 120, 39),  # 51 s
        trial(SVIP, 140, 38),  # 52 s
        trial(ORACLE, 80, 20),  # 28 s
        trial(None, 0, 70),
    ]
    return ComparedPolicy("one", trials)


@pytest.fixture
def two() -> ComparedPolicy:
    trials = [
        trial(FIXED, 150, 45),
        trial(SURE, 200, 40),
        trial(SURER, 150, 40),
        trial(SVIP, 0, 54),
    ]
    return ComparedPolicy("two", trials)


def test_the_best_of_each_family_is_held_against_fixed_k_and_the_oracle(
    one: ComparedPolicy,
) -> None:
    best = best_of_families([one])
    with_draft = best[best["draft"] == "d"].set_index("family")
    assert list(with_draft.index) == ["oracle", "confidence", "svip", "fixed"]
    confident = with_draft.loc["confidence"]
    assert confident["configuration"] == "confidence 0.4"
    assert confident["tried"] == 2
    assert confident["latency_ms"] == pytest.approx(500)
    assert confident["speedup"] == pytest.approx(2)
    assert confident["over_fixed"] == pytest.approx(55 / 50 - 1)
    assert confident["of_oracle"] == pytest.approx(28 / 50)
    lookup = best[best["family"] == "prompt_lookup"].iloc[0]
    assert math.isnan(lookup["over_fixed"])
    assert math.isnan(lookup["of_oracle"])


def test_a_choice_is_charged_for_what_it_loses_on_the_other_set(
    one: ComparedPolicy, two: ComparedPolicy
) -> None:
    moved = transfers([one, two]).set_index(["family", "chosen_on", "used_on"])
    # 0.4 is best on one and takes 60 s on two, where 0.6 takes 55.
    assert moved.loc[("confidence", "one", "two"), "loss"] == pytest.approx(60 / 55 - 1)
    assert moved.loc[("confidence", "two", "one"), "loss"] == pytest.approx(51 / 50 - 1)
    # Of all that adapt, svip is best on two (54 s) and 0.4 on one.
    assert moved.loc[(ADAPTIVE, "one", "two"), "loss"] == pytest.approx(60 / 54 - 1)
    assert moved.loc[(ADAPTIVE, "two", "one"), "loss"] == pytest.approx(52 / 50 - 1)
    assert (moved.xs("one", level="used_on").xs("one", level="chosen_on")["loss"] == 0).all()
    assert "oracle" not in moved.index.get_level_values("family")
    # What was tried on one alone is chosen on neither for the other.
    fixed = moved.loc[("fixed", "one", "two")]
    assert fixed["configuration"] == "K=3"


def test_what_is_held_against_the_product_was_chosen_on_other_prompts() -> None:
    prompts = [np.array([number]) for number in range(60)]
    choose, report = judging_prompts(prompts)
    product = ConfidenceProductSettings(threshold=0.3)
    head = SpecDecPlusPlusSettings(head="mine", threshold=0.5)
    other = SpecDecPlusPlusSettings(head="mine", threshold=0.7)
    trials = [trial(policy, 140, 36) for policy in (product, head, other, SVIP)]
    seconds = {each.id: np.full(60, 10.0) for each in trials}
    fast, slow = seconds[trials[1].id], seconds[trials[2].id]
    # 0.5 is faster where thresholds are chosen, 0.7 where they are reported.
    fast[choose], fast[report] = 5.0, 12.5
    slow[choose], slow[report] = 6.0, 1.0
    seconds[trials[3].id] = 8 + np.arange(60) % 3
    compared = ComparedPolicy("one", trials, prompts, seconds)
    found = against_product(compared).set_index("family")
    assert found.loc["specdecpp", "head"] == "mine"
    assert found.loc["specdecpp", "config_id"] == trials[1].id
    assert found.loc["specdecpp", "over"] == pytest.approx(0.8)
    assert found.loc["specdecpp", "over_low"] == pytest.approx(0.8)
    assert found.loc["confidence_product", "over"] == 1
    assert (
        found.loc["svip", "over_low"] < found.loc["svip", "over"] < found.loc["svip", "over_high"]
    )
    assert (found["prompts"] == len(report)).all()
    (line,) = verdicts(found.reset_index())
    assert "no head is shown to beat the confidence product by more than 2 %" in line
    assert line.endswith("the best, mine: 0.800× (0.800–0.800)")
    fast[report] = 5.0
    assert "a head beats" in verdicts(against_product(compared))[0]
    few = ComparedPolicy("few", trials, prompts[:1], seconds)
    assert against_product(few).empty


def test_everything_is_in_the_table(one: ComparedPolicy, two: ComparedPolicy) -> None:
    table = everything([one, two])
    assert len(table) == len(one.trials) + len(two.trials)
    assert table["speedup" if "speedup" in table else "estimated_speedup"].notna().all()
