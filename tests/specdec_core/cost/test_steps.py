"""The time of a step is a function of sums over its rows, and is fitted from measured forwards."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from specdec_core.base.errors import UserError
from specdec_core.cost import ForwardCost, Hardware, Measurement, Profile
from specdec_core.cost.steps import (
    FEW,
    EngineTerms,
    EngineWork,
    ForwardTerms,
    PackedForward,
    StepTimes,
    Work,
    fit_quality,
    load_step_times,
)

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


def forwards(terms: ForwardTerms, count: int = 80) -> list[PackedForward]:
    rng = random.Random(0)
    works = [
        Work.of((rng.randint(1, 40), rng.randint(0, 500)) for _ in range(rng.randint(1, 24)))
        for _ in range(count)
    ]
    return [PackedForward(seconds=terms.seconds(w), **w._asdict()) for w in works]


def test_work_is_the_sum_over_rows() -> None:
    work = Work.of([(1, 100), (3, 10)])
    # The second row's tokens see 10, 11 and 12 before them.
    assert work == Work(rows=2, tokens=4, cached=110, pairs=100 + 33, few_pairs=133)
    assert TRUE.seconds(work) == pytest.approx(8e-3 + 2 * 2e-4 + 4 * 5e-5 + 110 * 2e-6 + 133 * 8e-7)
    chunk = Work.of([(1, 100), (FEW, 0)])
    assert (chunk.pairs, chunk.few_pairs) == (100 + FEW * (FEW - 1) / 2, 100)


def test_a_fit_finds_terms_and_knee_again() -> None:
    measured = forwards(TRUE)
    fitted = ForwardTerms.fit(measured)
    assert fitted.knee == TRUE.knee
    assert fitted.model_dump() == pytest.approx(TRUE.model_dump(), rel=1e-4)
    r2, error = fit_quality(fitted, measured)
    assert r2 == pytest.approx(1)
    assert error < 1e-4


def test_no_term_is_negative_where_forwards_get_faster_with_more_work() -> None:
    measured = [
        PackedForward(seconds=1 / (1 + n), **Work.of([(1, 0)] * n)._asdict()) for n in range(1, 9)
    ]
    assert min(ForwardTerms.fit(measured).model_dump().values()) >= 0
    with pytest.raises(ValueError, match="no measurements"):
        ForwardTerms.fit([])


def test_what_the_engine_adds_is_fitted() -> None:
    true = EngineTerms(
        per_step=1e-3,
        per_row=1e-4,
        per_draft_forward=2e-4,
        per_candidate=1e-5,
        per_lookup=3e-5,
        per_read=5e-6,
        per_entering=7e-4,
    )
    rng = random.Random(0)
    most = (16, 8, 60, 16, 256, 4)
    works = [EngineWork(*(rng.randint(0, n) for n in most)) for _ in range(50)]
    fitted = EngineTerms.fit(works, [true.seconds(work) for work in works])
    assert fitted.model_dump() == pytest.approx(true.model_dump(), rel=1e-6)
    # Of steps that did the same a slow one does not count.
    seconds = [true.seconds(work) * factor for work in works for factor in (1, 1, 20)]
    fitted = EngineTerms.fit([work for work in works for _ in range(3)], seconds)
    assert fitted.model_dump() == pytest.approx(true.model_dump(), rel=1e-6)


def test_what_many_steps_took_counts_more_than_what_few_did() -> None:
    """No sum fits both: steps that only decode are most of what an engine does."""
    often, rare = EngineWork(rows=1), [EngineWork(rows=1, read=n) for n in range(100, 120)]
    seconds = [1e-4] * 400 + [3e-4] * len(rare)
    fitted = EngineTerms.fit([*[often] * 400, *rare], seconds)
    crooked = EngineTerms.fit([often, *rare], [1e-4, *[3e-4] * len(rare)])
    assert abs(fitted.seconds(often) / 1e-4 - 1) < abs(crooked.seconds(often) / 1e-4 - 1)


def test_a_profile_tells_step_times() -> None:
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
    )
    times = StepTimes.of(profile)
    work = Work.of([(2, 100)] * 8)
    assert times.target.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.02)
    assert times.draft() == times.draft("draft") == times.target
    assert times.engine.per_step == 1e-3


def test_step_times_are_saved_and_read_again(tmp_path: Path) -> None:
    times = StepTimes(target=TRUE, drafts={"draft": TRUE}, device="cpu")
    assert load_step_times(times.save(tmp_path / "steps.json"), ["draft"]) == times


def test_another_machines_forward_times_are_constant(tmp_path: Path) -> None:
    hardware = Hardware.model_validate({"name": "A100", "target": 0.1, "drafts": {"*": 0.01}})
    path = tmp_path / "h.yaml"
    path.write_text(json.dumps(hardware.model_dump(mode="json")))
    times = load_step_times(path, ["small"])
    for rows in (1, 64):
        assert times.target.seconds(Work.of([(5, 300)] * rows)) == pytest.approx(0.1)
        assert times.draft("small").seconds(Work.of([(1, 300)] * rows)) == pytest.approx(0.01)


def test_another_machines_target_alone_has_its_own_time(tmp_path: Path) -> None:
    path = tmp_path / "h.yaml"
    target = {"speculative": 0.2, "alone": 0.1}
    path.write_text(json.dumps({"name": "A100", "target": target, "drafts": {"*": 0.01}}))
    times, work = load_step_times(path, ["small"]), Work.of([(1, 300)] * 4)
    assert times.verifying(False, candidates=False).seconds(work) == pytest.approx(0.1)
    # Candidates of a lookup are verified, too.
    assert times.verifying(False).seconds(work) == pytest.approx(0.2)
    assert times.verifying(True, candidates=False).seconds(work) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"target": {"fixed": 1}}, "drafts.small: no times given (there are: none)"),
        ({"target": {"fixed": -1}}, "target.fixed: Input should be greater than or equal to 0"),
        ({"target": {"fixed": 1, "per_layer": 2}}, "target.per_layer: unknown key"),
        ({"target": 0.1, "name": "x"}, "drafts: Field required"),
    ],
)
def test_wrong_step_times_are_one_line(
    content: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "h.yaml"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as raised:
        load_step_times(path, ["small"])
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_a_draft_without_times_is_named() -> None:
    with pytest.raises(UserError, match=r"draft huge \(there are: none\)"):
        StepTimes(target=TRUE).draft("huge")
