"""The configuration that is chosen for each number of requests."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.choice import choose_for_load, finalists_at
from specdec_core.search.load.decoded import can_simulate
from specdec_core.search.load.live import EngineTimer
from specdec_core.search.load.records import records_frame
from specdec_core.search.load.schedule import choose_schedule, drafter_at, scheduled
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import LiveSettings, Load, Workload
from tests.load_timer import ALWAYS_FREE, UP_TO_A_DOZEN, Machine
from tests.specdec_core.kinds import chain, configured

SIX, FIVE, TWO, LOOKUP = (
    configured(chain(max_tokens=6)),
    configured(chain(max_tokens=5)),
    configured(chain(max_tokens=2)),
    configured({"kind": "prompt_lookup"}),
)
WORKLOAD = Workload(clients=(1, 8), requests=8)
LIVE = LiveSettings(repeats=2)


def test_finalists_are_near_the_best_and_of_several_families():
    values = {SIX: 100, FIVE: 99, TWO: 98, LOOKUP: 96, AUTOREGRESSIVE: 100}
    simulated = pd.Series({each.id: value for each, value in values.items()})
    chosen = finalists_at(simulated, values, SIX.id, LiveSettings())
    assert chosen == [SIX, LOOKUP, FIVE]
    assert finalists_at(simulated, values, SIX.id, LiveSettings(within=0.03)) == [SIX, FIVE, TWO]
    # What the simulation chose is timed even where another is a little better.
    assert finalists_at(simulated, values, TWO.id, LiveSettings(finalists=1)) == [TWO]
    nobody = finalists_at(simulated, values, AUTOREGRESSIVE.id, LiveSettings(within=0.01))
    assert nobody == [SIX, FIVE]
    # Autoregressive decoding has at least one to be compared with.
    behind = pd.Series({SIX.id: 50, TWO.id: 49, AUTOREGRESSIVE.id: 100})
    assert finalists_at(behind, [*values], AUTOREGRESSIVE.id, LiveSettings()) == [SIX]


def test_what_follows_the_load_below_another_drafter_or_begins_with_the_target_is_not_simulated():
    knows = SimpleNamespace(can=lambda configuration: True)
    ranges = {"kind": "schedule", "ranges": {1: 6, 8: 2}}
    inner = {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": ranges}
    begun = {"kind": "target_tree", "branching": [1, 2]}  # no part of a schedule
    cases = {"flat": ranges, "inner": inner, "begun": begun}
    found = {name: can_simulate(knows, configured(each)) for name, each in cases.items()}
    assert found == {"flat": True, "inner": False, "begun": False}


def test_the_simulation_decides_where_nothing_can_be_timed(replay):
    choice, simulated = choose_for_load([SIX, TWO], replay, UP_TO_A_DOZEN, WORKLOAD)
    assert not choice.timed
    assert drafter_at(choice.chosen, 1) is not None
    assert drafter_at(choice.chosen, 8) is None
    assert choice.chosen.id in set(simulated["config_id"])
    assert [verdict.regret for verdict in choice.verdicts] == [None, None]


def test_a_schedule_of_the_plan_may_be_the_best_everywhere(replay):
    ranges = {1: SIX.drafter.model_dump(), 5: TWO.drafter.model_dump()}
    own = configured({"kind": "schedule", "ranges": ranges})
    choice, _ = choose_for_load([own], replay, ALWAYS_FREE, WORKLOAD)
    assert choice.chosen == own


def test_the_choice_is_made_by_what_was_measured(replay, tmp_path):
    """With 8 clients drafting never pays by the step times, and always by the live runs."""
    machine = Machine(replay, WORKLOAD, ALWAYS_FREE)
    live = LIVE.model_copy(update={"within": 0.6})
    arguments = [SIX, TWO], replay, UP_TO_A_DOZEN, WORKLOAD, live, machine
    choice, _ = choose_for_load(*arguments, tmp_path)
    assert choice.timed
    assert drafter_at(choice.chosen, 1) is not None
    assert drafter_at(choice.chosen, 8) is not None
    for verdict in choice.verdicts:
        row = choice.row(verdict.load, verdict.config_id)
        assert row.low > 1
        assert verdict.regret == pytest.approx(0, abs=0.01)
        assert verdict.at_most is not None
        baseline = choice.row(verdict.load, AUTOREGRESSIVE.id)
        assert baseline.speedup == 1
    # What is served was timed at every load.
    assert all(choice.row(verdict.load, choice.chosen.id).live for verdict in choice.verdicts)
    table = choice.table()
    alone = table[(table["load"] == "1 client") & (table["config_id"] == AUTOREGRESSIVE.id)]
    assert alone["value_error"].item() == pytest.approx(0, abs=1e-6)  # up to a dozen tokens
    assert (table["value_error"].abs() > 0.1).any()
    assert choice.errors().keys() == {"value", "tpot", "ttft"}
    # Interrupted and repeated, it takes nothing again.
    again = Machine(replay, WORKLOAD, ALWAYS_FREE)
    repeated, _ = choose_for_load(*arguments[:-1], again, tmp_path)
    assert again.taken == []
    assert repeated.model_copy(update={"pace": choice.pace}) == choice
    assert type(choice).model_validate_json(choice.model_dump_json()) == choice


def test_a_schedule_that_the_measurements_make_is_timed_as_a_whole(replay, tmp_path):
    """The step times say that drafting always pays, the live runs that it stops to."""
    machine = Machine(replay, WORKLOAD, UP_TO_A_DOZEN)
    choice, _ = choose_for_load([SIX], replay, ALWAYS_FREE, WORKLOAD, LIVE, machine, tmp_path)
    assert isinstance(choice.chosen.drafter, ScheduleSettings)
    assert drafter_at(choice.chosen, 1) == SIX.drafter
    assert drafter_at(choice.chosen, 8) is None
    for load in ("1 client", "8 clients"):
        assert machine.taken.count((load, choice.chosen.id)) == LIVE.repeats
    row = choice.row(choice.verdicts[0].load, choice.chosen.id)
    assert row.low > 1


def test_an_open_loop_chooses_among_configurations_and_a_schedule(replay, tmp_path):
    workload = Workload(rate=30, requests=16)
    machine = Machine(replay, workload, UP_TO_A_DOZEN)
    choice, simulated = choose_for_load(
        [SIX, TWO], replay, UP_TO_A_DOZEN, workload, LIVE, machine, tmp_path
    )
    assert choice.by == "request_speed"
    assert set(simulated["load"]) >= {"1 client", "16 clients", "30 requests/s"}
    [verdict] = choice.verdicts
    assert verdict.config_id == choice.chosen.id
    assert verdict.load == Load(rate=30, requests=16)


def test_live_runs_follow_the_workload(replay, tiny_pair):
    """On the live engine: the same prompts as simulated, arrivals on the wall clock."""
    workload = Workload(rate=200, requests=6)
    traffic = Traffic.of(workload, replay.recording)
    [load] = traffic.live_loads(LIVE)
    timer = EngineTimer(tiny_pair, traffic)
    records = records_frame(timer.answer(TWO, load))
    assert records["sent"].tolist() == traffic.arrivals(load)
    lengths = [len(tokens) for tokens in replay.recording.prompts.tokens]
    assert records["prompt_tokens"].tolist() == (2 * lengths)[:6]
    outputs = [len(tokens) for tokens in replay.recording.prompts.outputs]
    assert records["tokens"].tolist() == (2 * outputs)[:6]


def test_some_requests_are_answered_untimed_before_the_first_run(replay, tiny_pair, monkeypatch):
    traffic = Traffic.of(Workload(clients=(1, 2), requests=6), replay.recording)
    timer, asked = EngineTimer(tiny_pair, traffic), []
    add = timer.engine.add
    monkeypatch.setattr(timer.engine, "add", lambda each: asked.append(each.id) or add(each))
    for configuration in (TWO, TWO, AUTOREGRESSIVE):
        timer.answer(configuration, traffic.loads[1])
    whole = [str(n) for n in range(6)]
    assert asked == ["0", "1", *whole, *whole, "0", "1", *whole]


def test_a_trace_sends_its_own_prompts(replay, tiny_pair, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival": 0, "prompt": "y = ", "max_new_tokens": 3}\n'
        '{"arrival": 0.01, "prompt_tokens": 40, "output_tokens": 5}'
    )
    traffic = Traffic.of(Workload(trace=str(trace)), replay.recording)
    [load] = traffic.loads
    assert (load.label, load.requests) == ("trace", 2)
    timer = EngineTimer(tiny_pair, traffic)
    records = records_frame(timer.answer(AUTOREGRESSIVE, load))
    assert records["prompt_tokens"].tolist() == [len(timer.engine.encode("y = ")), 40]
    assert (records["tokens"] <= [3, 5]).all()
    # Simulated, they are as long: the recording gives the rounds alone.
    answers = replayed_answers(replay, AUTOREGRESSIVE)
    simulated = traffic.simulate(StepCosts(answers, ALWAYS_FREE), load).records
    assert simulated["prompt_tokens"].tolist() == records["prompt_tokens"].tolist()


class Near(Machine):
    """All configurations answer as six candidates do. With two clients or more the one that was
    best for one takes a little longer than `best`, give or take."""

    best = FIVE

    def answer(self, configuration, load):
        records = super().answer(SIX, load)
        noise = np.random.default_rng([len(self.taken)]).normal(1, 0.02, len(records))
        pace = {SIX.id: 1.0, FIVE.id: 2.0}.get(configuration.id, 3.0)
        if load.clients != 1 and configuration in (SIX, self.best):
            pace = 1.004 if configuration == SIX else 1.0
        for record, each in zip(records, pace * noise, strict=True):
            record.last = record.sent + (record.last - record.sent) * each
        return records


@pytest.mark.parametrize(("cost", "best"), [(0.2, FIVE), (0.0, FIVE), (0.2, AUTOREGRESSIVE)])
def test_what_was_best_before_stays_only_where_it_costs_little_and_nothing_to_no_speculation(
    replay, cost, best, tmp_path
):
    workload = Workload(clients=(1, 2), requests=48)
    live = LiveSettings(repeats=4, cost=cost, within=0.5, requests=48)
    machine = Near(replay, workload, UP_TO_A_DOZEN)
    machine.best = best
    choice, _ = choose_for_load([SIX, FIVE], replay, ALWAYS_FREE, workload, live, machine, tmp_path)
    one, two = choice.verdicts
    assert one.config_id == SIX.id
    assert {SIX.id, best.id} <= set(two.in_question)
    assert two.config_id == (SIX if cost and best is FIVE else best).id


def ranges(configuration):
    return configuration.drafter.ranges


def test_neighbours_with_one_drafter_are_one_range_and_one_everywhere_is_that_itself():
    assert scheduled({1: SIX, 8: SIX}) == SIX
    assert scheduled({4: AUTOREGRESSIVE}) == AUTOREGRESSIVE
    chosen = scheduled({1: SIX, 2: SIX, 4: TWO, 8: AUTOREGRESSIVE, 16: AUTOREGRESSIVE})
    assert ranges(chosen) == {1: SIX.drafter, 3: TWO.drafter, 5: None}
    drafters = [drafter_at(chosen, n) for n in (1, 2, 3, 4, 5, 99)]
    assert drafters == [SIX.drafter, SIX.drafter, TWO.drafter, TWO.drafter, None, None]


def test_a_schedule_samples_as_its_parts():
    sampling = Sampling(temperature=0.5)
    warm = [each.model_copy(update={"sampling": sampling}) for each in (SIX, AUTOREGRESSIVE)]
    chosen = scheduled({1: warm[0], 2: warm[1]})
    assert chosen.sampling == sampling
    with pytest.raises(ValueError, match="must sample alike"):
        scheduled({1: warm[0], 2: AUTOREGRESSIVE})


def test_a_change_has_to_gain_something():
    rows = [
        (clients, each.id, value)
        for clients, values in {1: (100, 150, 90), 4: (200, 199.5, 201), 8: (300, 200, 250)}.items()
        for each, value in zip((AUTOREGRESSIVE, SIX, TWO), values, strict=True)
    ]
    names = ["clients", "config_id", "tokens_per_second"]
    simulated = pd.DataFrame(rows, columns=names)
    known = [AUTOREGRESSIVE, SIX, TWO]
    assert ranges(choose_schedule(simulated, known)) == {1: SIX.drafter, 5: None}
    eager = choose_schedule(simulated, known, tolerance=0)
    assert ranges(eager) == {1: SIX.drafter, 2: TWO.drafter, 5: None}
    # A change to no speculation need not gain as much.
    close = pd.DataFrame(
        [*rows[:3], (4, SIX.id, 199.5), (4, AUTOREGRESSIVE.id, 200)], columns=names
    )
    assert ranges(choose_schedule(close, known)) == {1: SIX.drafter, 2: None}
