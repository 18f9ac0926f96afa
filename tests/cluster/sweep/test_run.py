"""A sweep's counts are the engine's, its outputs the target's, its choices fair."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from cluster.sweep.finalists import choose_challengers, choose_finalists
from cluster.sweep.run import run_sweep
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Engine, Request
from specdec_core.search.folder import SweepFolder, find_trial
from specdec_core.search.results import SweepResult, Trial
from specdec_core.tokens.statistics import Counts
from tests.commands import prompts_file, sweep_plan
from tests.configurations import LOOKUP, LOSSY
from tests.jobs.conftest import record_prompts
from tests.observers import HeardSweep
from tests.specdec_core.kinds import chain, configured

pytestmark = pytest.mark.usefixtures("ray_running")

PROMPTS = ["def add(a, b): return a + b", "for i in range(10): print(i)", "x = [1, 2, 3]"]
SEARCH = [
    {"drafter": chain(max_tokens=[2, 5])},
    {"drafter": chain("confidence", threshold=0.4)},
    {"drafter": {"kind": "prompt_lookup"}},
]
TREE = {"kind": "dynamic_tree", "policy": {"kind": "fixed", "max_tokens": 6}}


class Stopped(HeardSweep):
    """Ctrl-C comes when this stage begins."""

    def __init__(self, stage):
        super().__init__()
        self.last = stage

    def stage(self, name, steps=None, done=0):
        if name == self.last:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return prompts_file(tmp_path_factory.mktemp("prompts"), PROMPTS)


def plan_for(spec, prompts, **changes):
    return sweep_plan(spec, prompts, **{"max_new_tokens": 16, "search": SEARCH, **changes})


Swept = tuple[SweepResult, SweepFolder, HeardSweep]


@pytest.fixture(scope="module")
def swept(tiny_spec, prompts, tmp_path_factory):
    heard = HeardSweep()
    home = tmp_path_factory.mktemp("home")
    return *run_sweep(plan_for(tiny_spec, prompts), home, observer=heard), heard


def test_counts_are_those_of_the_engine_and_rounds_those_that_they_sum(swept, tiny_pair):
    result, folder, heard = swept
    assert len(result.trials) == 5  # four drafters and autoregressive decoding
    [said] = (line for line in heard.warnings if "nothing is replayed" in line)
    assert "16 new tokens; `specdec record --config`" in said
    engine = Engine(tiny_pair)
    requests = [Request(str(i), engine.encode(text), 16) for i, text in enumerate(PROMPTS)]
    for trial in result.trials:
        engine.configure(trial.configuration)
        assert trial.counts == Counts.of(engine.generate(requests)).as_dict()
        assert trial.finished
    rounds = pd.read_parquet(folder.path / "rounds.parquet").groupby("config_id")
    for trial in result.trials:
        own = rounds.get_group(trial.id)
        assert len(own) == trial.counts["n_target"]
        assert own["generated"].sum() == trial.counts["n"]
        assert own["draft_forwards"].sum() == trial.counts["n_draft"]


def test_finalists_write_what_the_target_writes_alone(swept):
    result = swept[0]
    families = {result.trial(t.config_id).configuration.family for t in result.timings}
    assert families == {"fixed", "confidence", "prompt_lookup"}
    for timing in (result.autoregressive, *result.timings):
        assert timing.differing_outputs == 0
        assert np.array(timing.seconds).shape == (2, len(PROMPTS))
        assert timing.low <= timing.speedup <= timing.high


def test_the_result_is_saved_and_read_again_without_running_anything(swept, tiny_spec, prompts):
    result, folder, heard = swept
    assert SweepResult.load(folder.path) == result
    assert sorted(heard.finished) == sorted(t.id for t in result.trials)
    again, same = run_sweep(plan_for(tiny_spec, prompts), folder.path.parents[1])
    assert (again, same) == (result, folder)
    assert find_trial(folder.path.parent, result.trials[0].id[:6])[1] == result.trials[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": {"small": 0.01}}, r"^profile: no forward time of draft 'draft' .*small"),
        ({"proposals": {"suffix": 0.01}}, "^profile: of a server: --engine"),
    ],
)
def test_a_profile_that_cannot_rank_is_refused_before_anything_is_written(
    changes, message, tiny_spec, prompts, tmp_path
):
    profile = {"device": "far", "target": 0.1, "drafts": {"*": 0.01}, **changes}
    with pytest.raises(UserError, match=message):
        run_sweep(plan_for(tiny_spec, prompts, profile=profile), tmp_path)
    assert not (tmp_path / "sweeps").exists()


def test_a_result_of_other_weights_is_not_delivered(swept, tiny_spec, prompts, tmp_path):
    _, folder, _ = swept
    copy = SweepFolder(tmp_path / "sweeps" / folder.name)
    shutil.copytree(folder.path, copy.path)
    weights = copy.path / "weights.json"
    weights.write_text(json.dumps({**(copy.weights() or {}), "draft": "0" * 16}))
    with pytest.raises(UserError, match="begun with other weights of draft; give --fresh"):
        run_sweep(plan_for(tiny_spec, prompts), tmp_path)
    weights.unlink()  # a folder of before
    assert run_sweep(plan_for(tiny_spec, prompts), tmp_path)[1] == copy


@pytest.mark.long
def test_finalists_answer_a_workload_and_what_was_timed_is_not_timed_again(
    tiny_pair, prompts, tmp_path
):
    record_prompts(tiny_pair, prompts, tmp_path / "traces" / "mine", 16)
    plan = plan_for(
        tiny_pair.spec,
        prompts,
        search=[*SEARCH, {"drafter": {"kind": "schedule", "ranges": {1: TREE, 2: None}}}],
        finalists=1,
        repeats=1,
        workload={"clients": [1, 3], "requests": 4},
        live={"finalists": 1, "repeats": 2},
    )
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, tmp_path, observer=Stopped("timing 3 clients"))
    taken = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweeps/*/live/*.json")}
    assert len(taken) >= 4  # autoregressive decoding and another, in two turns
    # A schedule's range that nobody else drafts like is decoded once.
    [decoded] = tmp_path.glob("traces/mine/decoded/*.parquet")
    taken[decoded] = decoded.stat().st_mtime_ns

    heard = HeardSweep()
    result, folder = run_sweep(plan, tmp_path, observer=heard)
    assert heard.finished == []  # neither counted nor timed again
    timed = folder.timed()
    assert result.timings == timed.timings
    files = [decoded, *(folder.path / "live").iterdir()]
    live = {path: path.stat().st_mtime_ns for path in files}
    assert taken.items() < live.items()
    assert [verdict.load.clients for verdict in result.under_load.verdicts] == [1, 3]
    assert all(len(row.live) == 2 for row in result.under_load.rows)
    assert result.served.configuration == result.under_load.chosen
    assert SweepResult.load(folder.path) == result


@pytest.mark.long
def test_what_was_decoded_to_be_counted_competes_for_each_load(tiny_pair, prompts, tmp_path):
    record_prompts(tiny_pair, prompts, tmp_path / "traces" / "mine", 16)
    one = chain(max_tokens=1)
    by_load = {"kind": "schedule", "ranges": {1: {**TREE, "keep": 8}, 2: one}}
    plan = plan_for(
        tiny_pair.spec,
        prompts,
        search=[{"drafter": TREE}, {"drafter": one}, {"drafter": by_load}],
        profile={"device": "far away", "target": 0.1, "drafts": {"*": 0.001}},
        workload={"clients": [1, 3], "requests": 4},
    )
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, tmp_path, observer=Stopped("simulating load"))
    heard = HeardSweep()
    result, _ = run_sweep(plan, tmp_path, observer=heard)
    assert heard.finished == []  # the rounds are those that were counted
    assert any("not simulated" in warning and "ranges" in warning for warning in heard.warnings)
    choice = result.under_load
    decoded = {t.id for t in result.trials if t.configuration.family.startswith("dynamic")}
    assert set(choice.decoded) == decoded == {choice.chosen.id}


@pytest.mark.long
def test_optuna_proposes_and_asha_stops_and_a_resumed_study_is_not_repeated(
    tiny_spec, prompts, tmp_path
):
    search = [{"drafter": chain(max_tokens={"randint": [1, 30]})}]
    proposed = {"method": "optuna", "trials": 6, "early_stopping": True, "search": search}
    plan = plan_for(tiny_spec, prompts, **proposed)
    heard = HeardSweep()
    result, folder = run_sweep(plan, tmp_path, observer=heard)
    drafted = [t for t in result.trials if t.configuration.drafter]
    assert 1 < len(drafted) <= 6  # the same length may be proposed twice
    assert {t.configuration.family for t in drafted} == {"fixed"}
    finished = [t for t in drafted if t.finished]
    assert finished
    for trial in drafted:
        assert (trial.counts["requests"] == len(PROMPTS)) == trial.finished

    (folder.path / "sweep.json").unlink()  # as if the driver had died while timing
    weights = folder.weights()
    (folder.path / "weights.json").write_text(json.dumps({**weights, "draft": "trained since"}))
    with pytest.raises(UserError, match="other weights of draft"):
        run_sweep(plan, tmp_path)
    (folder.path / "weights.json").write_text(json.dumps(weights))
    machine = (folder.path / "machine.json").read_text()
    (folder.path / "machine.json").write_text(json.dumps({**json.loads(machine), "cpu": "another"}))
    with pytest.raises(UserError, match=r"has times of another machine \(cpu another, not"):
        run_sweep(plan, tmp_path)
    (folder.path / "machine.json").write_text(machine)
    heard = HeardSweep()
    resumed, _ = run_sweep(plan, tmp_path, observer=heard)
    assert heard.finished == []
    assert {t.id: t.counts for t in resumed.trials} == {t.id: t.counts for t in result.trials}


# Choices


def trial(configuration, estimate, finished=True, seconds=1.0):
    counts = Counts(1, 10, 0, 10, 0, 0, 0, 10).as_dict()
    metrics = {"estimated_speedup": estimate, "estimated_seconds": seconds}
    return Trial(configuration=configuration, counts=counts, metrics=metrics, finished=finished)


FIXED = [configured(chain(max_tokens=k)) for k in range(1, 9)]
CONFIDENT = configured(chain("confidence"))


def test_the_best_of_each_family_is_a_finalist_before_the_next_best_of_any():
    trials = [trial(c, 2 + i / 10) for i, c in enumerate(FIXED)]
    trials += [trial(CONFIDENT, 1.5), trial(LOOKUP, 1.2), trial(AUTOREGRESSIVE, 9.0)]
    chosen = [t.configuration for t in choose_finalists(trials, 4)]
    assert chosen == [FIXED[7], FIXED[6], CONFIDENT, LOOKUP]


@pytest.mark.parametrize(
    "other",
    [trial(FIXED[0], 3.0, finished=False), trial(LOSSY, 3.0)],
    ids=["stopped early", "lossy"],
)
def test_what_is_no_finalist_takes_no_place(other):
    trials = [other, trial(FIXED[1], 1.5), trial(FIXED[2], 1.0)]
    assert [t.configuration for t in choose_finalists(trials, 2)] == [FIXED[1], FIXED[2]]


def test_who_may_be_faster_than_all_timed_within_the_error_of_estimates_is_a_challenger():
    expected = {AUTOREGRESSIVE: 1.0, FIXED[0]: 0.6, FIXED[1]: 0.5, FIXED[2]: 0.51, FIXED[3]: 0.56,
                FIXED[4]: 0.4, LOSSY: 0.3}  # fmt: skip
    trials = [trial(c, 1 / seconds, seconds=seconds) for c, seconds in expected.items()]
    exact = {AUTOREGRESSIVE.id: 1.0, FIXED[0].id: 0.6, FIXED[1].id: 0.5}
    assert choose_challengers(trials, exact) == [FIXED[4]]
    # One took 5 ms a round more, and so may the others: estimates are off by some 9 %.
    noisy = {**exact, FIXED[0].id: 0.65, FIXED[1].id: 0.5}
    assert choose_challengers(trials, noisy) == [FIXED[4], FIXED[2]]
    assert choose_challengers(trials, noisy, ["target_tree"])[0] == LOSSY


def test_a_lossy_method_that_is_allowed_by_name_may_be_a_finalist():
    allowed = choose_finalists([trial(LOSSY, 3.0), trial(FIXED[1], 1.5)], 4, ["target_tree"])
    assert [t.configuration for t in allowed] == [LOSSY, FIXED[1]]


# Folders


def begun(root, name, digest):
    folder = SweepFolder(root / name)
    folder.begin({"search": SEARCH}, digest)
    return folder


def test_an_unfinished_sweep_goes_on_and_a_finished_one_is_left_alone(tmp_path):
    assert SweepFolder.claim(tmp_path, "s", "d").name == "s"
    folder = begun(tmp_path, "s", "d")
    assert SweepFolder.claim(tmp_path, "s", "d") == folder
    assert SweepFolder.claim(tmp_path, "s", "d", fresh=True).name == "s-2"
    folder.finish()
    assert SweepFolder.claim(tmp_path, "s", "d").name == "s-2"
    begun(tmp_path, "s-2", "d")
    assert SweepFolder.claim(tmp_path, "s", "d").name == "s-2"


def test_an_unfinished_sweep_of_that_name_with_other_settings_is_refused(tmp_path):
    begun(tmp_path, "mine", "d")
    with pytest.raises(UserError, match="--fresh"):
        SweepFolder.claim(tmp_path, "mine", "other")


def test_a_name_cannot_lead_out_of_the_workspace(tmp_path):
    for name in ("../elsewhere", "a/b", ".."):
        with pytest.raises(UserError, match="expected a folder's name"):
            SweepFolder.claim(tmp_path, name, "d")


def test_a_second_driver_is_kept_out_of_a_running_sweep(tmp_path):
    folder = begun(tmp_path, "s", "d")
    running = pytest.raises(UserError, match="running in another process")
    with folder.lock(), running, folder.lock():
        pass
    with folder.lock():
        pass
