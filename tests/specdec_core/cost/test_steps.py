"""The time of a step is a function of sums over its rows, and is fitted from measured forwards."""

import random

import pytest

from specdec_core.base.errors import UserError
from specdec_core.cost import ForwardCost, Hardware, Measurement, Profile
from specdec_core.cost.forward import FEW, ForwardTerms, Work
from specdec_core.cost.steps import StepTimes

TRUE = ForwardTerms(
    fixed=8e-3,
    per_row=2e-4,
    per_token=5e-5,
    per_cached=2e-6,
    per_pair=3e-7,
    per_few_pair=5e-7,
    per_token_beyond=1e-4,
    knee=64,
)


def test_work_is_the_sum_over_rows():
    work = Work.of([(1, 100), (3, 10)])
    # The second row's tokens see 10, 11 and 12 before them.
    assert work == Work(rows=2, tokens=4, cached=110, pairs=100 + 33, few_pairs=133)
    assert TRUE.seconds(work) == pytest.approx(8e-3 + 2 * 2e-4 + 4 * 5e-5 + 110 * 2e-6 + 133 * 8e-7)
    chunk = Work.of([(1, 100), (FEW, 0)])
    assert (chunk.pairs, chunk.few_pairs) == (100 + FEW * (FEW - 1) / 2, 100)


def test_a_fit_finds_terms_and_knee_again():
    rng = random.Random(0)
    works = [
        Work.of((rng.randint(1, 40), rng.randint(0, 500)) for _ in range(rng.randint(1, 24)))
        for _ in range(80)
    ]
    fitted = ForwardTerms.fit(works, [TRUE.seconds(work) for work in works])
    assert fitted.knee == TRUE.knee
    assert fitted.model_dump() == pytest.approx(TRUE.model_dump(), rel=1e-4)


def test_no_term_is_negative_where_forwards_get_faster_with_more_work():
    works = [Work.of([(1, 0)] * n) for n in range(1, 9)]
    fitted = ForwardTerms.fit(works, [1 / (1 + work.rows) for work in works])
    assert min(fitted.model_dump().values()) >= 0
    with pytest.raises(ValueError, match="no measurements"):
        ForwardTerms.fit([], [])


def test_a_profile_tells_step_times():
    measurements = [
        Measurement(
            width=width,
            context=context,
            batch=batch,
            seconds=TRUE.seconds(Work.of([(width, context)] * batch)),
        )
        for width in (1, 3, 9)
        for context in (64, 256)
        for batch in (1, 4, 16)
    ]
    cost = ForwardCost.fit(measurements)
    profile = Profile(
        target=cost,
        drafts={"draft": cost},
        device="cpu",
        target_dtype="float32",
        draft_dtype="float32",
        round_overhead=1e-3,
        draft_overhead={"draft": 1e-2},
        row_overhead=1e-4,
    )
    times = StepTimes.of(profile)
    work, single = Work.of([(3, 100)] * 8), Work.of([(1, 100)] * 8)
    assert times.target.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.02)
    for terms, more in ((times.verifying(candidates=False), 0), (times.draft("draft"), 1e-2)):
        assert terms.seconds(single) == pytest.approx(TRUE.seconds(single) + more, rel=0.02)
    assert (times.per_step, times.per_row) == pytest.approx((9e-4, 1e-4))


def test_another_machines_forward_times_are_constant():
    hardware = {"name": "A100", "target": {"speculative": 0.2, "alone": 0.1}, "drafts": {"*": 0.01}}
    times = StepTimes.of(Hardware.model_validate(hardware).profile(["small"]))
    for rows in (1, 64):
        assert times.target.seconds(Work.of([(5, 300)] * rows)) == pytest.approx(0.2)
        assert times.draft("small").seconds(Work.of([(1, 300)] * rows)) == pytest.approx(0.01)
        work = Work.of([(1, 300)] * rows)
        assert times.verifying(candidates=False).seconds(work) == pytest.approx(0.1)


def test_a_draft_without_times_is_named():
    with pytest.raises(UserError, match=r"draft huge \(there are: none\)"):
        StepTimes(target=TRUE).draft("huge")
