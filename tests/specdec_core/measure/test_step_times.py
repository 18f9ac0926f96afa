"""Step times are measured over many shapes, and what an engine's steps do is logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_core.base.environment import machine
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.cost.steps import EngineWork, ForwardTerms, StepTimes, Work
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.measure.step_times import (
    STEADY,
    EngineRuns,
    LiveForward,
    LoggedEngine,
    StepMeasurer,
    engine_runs,
    measure_steps,
    step_shapes,
    step_times,
)
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Output


def test_shapes_have_decoding_rows_and_chunks_within_the_cache() -> None:
    shapes = list(step_shapes(slots=16, count=48, longest=512, max_length=1024))
    assert shapes == list(step_shapes(16, 48, 512, 1024))
    assert {len(shape) for shape in shapes} >= {1, 4, 16}
    assert max(tokens + context for shape in shapes for tokens, context in shape) <= 1024
    chunks = [shape for shape in shapes if shape[-1][0] >= 16]
    assert len(chunks) == 16
    assert max(len(shape) for shape in chunks) > 1


def test_every_model_and_the_engine_are_measured(tiny_pair: Pair) -> None:
    measured = measure_steps(tiny_pair, slots=3, shapes=9, repeats=1)
    assert set(measured.forwards) == {None, "draft"}
    # The shapes, and an engine's own forwards with one to three rows.
    rows = [{each.rows for each in forwards[9:]} for forwards in measured.forwards.values()]
    assert rows == [{1, 2, 3}, {1, 2, 3}]
    times = measured.times
    work = Work.of([(5, 60)] * 3)
    assert times.target.seconds(work) > 0
    assert times.draft("draft").seconds(work) > 0
    assert times.engine.seconds(EngineWork(3, 4, 12)) > 0
    assert (times.pair, times.slots) == (tiny_pair.spec, 3)
    assert (times.fingerprints, times.machine) == (tiny_pair.fingerprints, machine())


def test_on_a_cpu_choosing_tokens_is_no_part_of_a_forward(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's forwards are logged without it, so that it would count twice."""
    measurer = StepMeasurer(tiny_pair, slots=2, shapes=3)
    monkeypatch.setattr(Output, "choices", lambda _: pytest.fail("chosen"))
    measurer.measure()


def test_a_forward_takes_what_it_takes_in_an_engine(tiny_pair: Pair) -> None:
    measurer = StepMeasurer(tiny_pair, slots=3, shapes=9)
    measurer.measure()
    works = [Work.of([(1, 60)] * rows) for rows in (1, 2, 3)] * 100
    runs = EngineRuns(forwards=[LiveForward("draft", work, 1.5) for work in works])
    alone, live = measurer.measured().times, measurer.measured(runs).times
    assert live.target == alone.target
    for work in works[:3]:
        ratio = live.draft("draft").seconds(work) / alone.draft("draft").seconds(work)
        assert 1.3 < ratio < 1.6  # the shapes have a say, too


def test_steps_without_candidates_take_what_they_take_in_a_row(tiny_pair: Pair) -> None:
    """A forward of few tokens is slower when others come between."""
    measurer = StepMeasurer(tiny_pair, slots=3, shapes=9)
    measurer.measure()
    alone = measurer.measured().times.verifying(False)
    runs = engine_runs(tiny_pair, measurer.measured().times, 3, Observer())
    steady = [each for each in runs.forwards if each.model == STEADY]
    assert {each.work.rows for each in steady} >= {1, 3}
    assert all(each.work.tokens == each.work.rows for each in steady)
    faster = [each._replace(slowdown=0.5) for each in steady] * 20
    times = measurer.measured(EngineRuns(forwards=faster)).times
    assert times.verifying(False) == alone
    for each in steady:
        ratio = times.verifying(False, candidates=False).seconds(each.work) / alone.seconds(
            each.work
        )
        assert 0.4 < ratio < 0.6


def test_times_of_another_pair_or_of_fewer_slots_are_refused(
    tiny_pair: Pair, tmp_path: Path
) -> None:
    path, spec = tmp_path / "steps.json", tiny_pair.spec
    times = StepTimes(target=ForwardTerms(fixed=1), drafts={"draft": ForwardTerms()})
    times.model_copy(update={"pair": spec, "slots": 4}).save(path)
    automatic = spec.runner.model_copy(update={"device": "auto", "target_dtype": "auto"})
    for fitting in (spec, spec.model_copy(update={"runner": automatic, "drafts": {}})):
        assert step_times(fitting, path, 4).target.fixed == 1
    with pytest.raises(UserError, match=r"steps.json: step times of up to 4 slots, not 16; delete"):
        step_times(spec, path, 16)
    with pytest.raises(UserError, match=r"step times of target .*, not bundled:target; delete it"):
        step_times(spec.model_copy(update={"target": "bundled:target"}), path, 4)
    threads = spec.runner.model_copy(update={"threads": 2})
    with pytest.raises(UserError, match="step times of threads 1, not 2"):
        step_times(spec.model_copy(update={"runner": threads}), path, 4)
    times.save(path)  # from before they were recorded, or by hand
    assert step_times(spec, path, 16) == times


def test_times_of_other_weights_or_of_another_machine_are_refused(
    tiny_pair: Pair, tmp_path: Path
) -> None:
    """A draft is trained further in its folder, and a workspace is shared."""
    path, spec = tmp_path / "steps.json", tiny_pair.spec
    times = StepTimes(
        target=ForwardTerms(fixed=1),
        drafts={"draft": ForwardTerms()},
        pair=spec,
        fingerprints=tiny_pair.fingerprints,
        machine=machine(),
    )
    times.save(path)
    assert step_times(spec, path, 4) == times
    before = {**tiny_pair.fingerprints, "draft": "0" * 16}
    times.model_copy(update={"fingerprints": before}).save(path)
    with pytest.raises(UserError, match=r"steps.json: step times of other weights of draft; delet"):
        step_times(spec, path, 4)
    assert step_times(spec.model_copy(update={"drafts": {}}), path, 4).fingerprints == before
    # A recording is simulated without its models, too.
    gone = spec.model_copy(update={"drafts": {"draft": str(tmp_path / "gone")}})
    times.model_copy(update={"pair": gone}).save(path)
    assert step_times(gone, path, 4).pair == gone
    for fact, message in (("cpu", "cpu B × 2, not .*; delete it"), ("gpu", "gpu B × 2, not none")):
        times.model_copy(update={"machine": {**machine(), fact: "B × 2"}}).save(path)
        with pytest.raises(UserError, match=f"step times of {message}"):
            step_times(spec, path, 4)


def test_a_logged_engine_says_what_its_steps_fed(tiny_pair: Pair) -> None:
    drafting = DraftModelSettings(draft="draft", policy=FixedSettings(max_tokens=3))
    engine = Engine(tiny_pair, Configuration(drafter=drafting), slots=2)
    logged = LoggedEngine(engine)
    logged.watch_draft("draft")
    prompts = {"a": (5, 6, 7, 8), "b": (9, 10, 11)}
    for name, tokens in prompts.items():
        engine.add(Request(name, tokens, 12, ignore_eos=True))
    finished = []
    while not engine.idle:
        finished += [name for name, done in logged.step() if done]
    log = logged.log
    assert sorted(finished) == ["a", "b"]
    assert log[0].work == EngineWork(rows=2, read=7, entering=2)
    # Both rows share a draft's forwards: none before the first tokens, then one prefills.
    assert log[1].work == EngineWork(rows=2, draft_forwards=4, candidates=6)
    assert log[2].work.draft_forwards == 3
    times = measure_steps(tiny_pair, 2, 4, 1).times
    assert all(step.seconds > step.forward_seconds for step in log)
    assert all(step.predicted(times) > 0 for step in log)
