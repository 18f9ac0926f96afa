"""A sweep that replays a recording counts what decoding would; what it cannot, it decodes."""

import json
import shutil

import pandas as pd
import pytest

from cluster.recording import run_recording
from cluster.sweep.run import run_sweep
from specdec_core.base.errors import UserError
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import fingerprints
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.schema import Recording
from specdec_core.search.folder import SweepFolder
from specdec_core.search.replaying import (
    fitting_recording,
    open_replay,
    recording_of,
    with_types_of,
)
from specdec_core.tokens.statistics import Counts
from tests.commands import prompts_file as write_prompts
from tests.commands import sweep_plan
from tests.conftest import save_random_head
from tests.jobs.conftest import record_prompts
from tests.observers import HeardSweep
from tests.specdec_core.cost.examples import cost_of, profile_of

pytestmark = pytest.mark.usefixtures("ray_running")

PROMPTS = ["def add(a, b): return a + b", "for i in range(10): print(i)", "x = [1, 2, 3]"]
TOKENS = 24


def drafting(**policy):
    return {"drafter": {"kind": "draft_model", "policy": policy}}


SEARCH = [
    drafting(kind="fixed", max_tokens=[2, 5, 21]),  # 21: longer than was recorded
    drafting(kind="heuristic", transient=False),
    drafting(kind="confidence_product", threshold=[0.2, 0.5]),
    drafting(kind="pre_cut", target_cost=5),
    drafting(kind="oracle"),
    {"drafter": {"kind": "prompt_lookup"}},
    {"drafter": {"kind": "tree", "branching": {"choice": [[3, 1], [2, [2, 1]]]}}},
    {"drafter": {"kind": "hybrid", "otherwise": {"kind": "tree", "branching": [2, 1, 1]}}},
    {"drafter": {"kind": "bandit", "arms": [1, 4, {"kind": "suffix"}]}},
    {"drafter": {"kind": "dynamic_tree"}},  # no recording tells it
]


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts"), PROMPTS)


def plan_for(spec, source, /, **changes):
    return sweep_plan(spec, source, **{"max_new_tokens": TOKENS, "search": SEARCH, **changes})


def typed(spec, dtype):
    """The pair in a data type."""
    return spec.with_runner(target_dtype=dtype, draft_dtype=dtype)


@pytest.fixture(scope="module")
def recorded(tiny_pair, prompts_file, tmp_path_factory):
    """A workspace with a recording."""
    home = tmp_path_factory.mktemp("home")
    record_prompts(tiny_pair, prompts_file, home / "traces" / "own", TOKENS)
    return home, Recording.open(home / "traces" / "own")


@pytest.fixture(scope="module")
def replayed(recorded, tiny_spec, prompts_file):
    heard, plan = HeardSweep(), plan_for(tiny_spec, prompts_file, race={"seconds": 0})
    return *run_sweep(plan, recorded[0], observer=heard), heard


def test_replayed_counts_are_the_live_ones(replayed, tiny_pair):
    engine = Engine(tiny_pair)
    requests = [Request(str(i), engine.encode(text), TOKENS) for i, text in enumerate(PROMPTS)]
    families = set()
    for trial in replayed[0].trials:
        configuration = trial.configuration
        families.add(configuration.family)
        if configuration.family == "oracle":  # which a replay alone knows
            assert trial.replayed
            continue
        longest = getattr(getattr(configuration.drafter, "policy", None), "max_tokens", 0)
        # Autoregressive decoding is counted where it is timed.
        decoded = longest == 21 or configuration.family in ("autoregressive", "dynamic_tree")
        assert trial.replayed is not decoded
        engine.configure(configuration)
        assert trial.counts == Counts.of(engine.generate(requests)).as_dict(), configuration.label
    assert families >= {"oracle", "dynamic_tree", "ucb", "tree"}


def test_the_result_says_what_the_replay_saved(replayed, recorded):
    result = replayed[0]
    told = [t for t in result.trials if t.replayed]
    assert result.replay.recording == str(recorded[1].folder)
    assert result.replay.configurations == len(told)
    saved = sum(t.counts["n_draft"] + t.counts["n_target"] for t in told)
    assert result.replay.forwards_saved == saved > 0
    assert result.replay.per_second > 0


def test_finalists_are_decoded_and_find_the_replayed_counts(replayed):
    result, folder, heard = replayed
    assert result.replay.checked >= 2
    assert result.replay.equal == result.replay.checked
    assert heard.warnings == []
    assert "oracle" not in {result.trial(t.config_id).configuration.family for t in result.timings}
    assert result.champion_trial.configuration.family != "oracle"
    rounds = pd.read_parquet(folder.path / "rounds.parquet")
    for trial in result.trials:  # few enough that all are notable
        own = rounds[rounds["config_id"] == trial.id]
        assert len(own) == trial.counts["n_target"]
        assert own["drafted"].sum() == trial.counts["n_drafted"]
    timed = rounds[rounds["config_id"] == result.timings[0].config_id]
    assert (timed["target_seconds"] > 0).all()


@pytest.mark.long
def test_a_replay_that_was_interrupted_goes_on(
    replayed, recorded, tiny_spec, prompts_file, tmp_path
):
    shutil.copytree(recorded[0], tmp_path, dirs_exist_ok=True)
    folder = SweepFolder(tmp_path / "sweeps" / replayed[1].name)
    (folder.path / "sweep.json").unlink()
    gone = [t for t in replayed[0].trials if t.replayed][:3]
    for trial in gone:
        (folder.path / "trials" / f"{trial.id}.json").unlink()
    heard = HeardSweep()
    plan = plan_for(tiny_spec, prompts_file, race={"seconds": 0})
    result, _ = run_sweep(plan, tmp_path, observer=heard)
    assert sorted(heard.finished) == sorted(trial.id for trial in gone)
    counts = {t.id: t.counts for t in replayed[0].trials}
    assert {t.id: t.counts for t in result.trials} == counts
    assert result.replay.configurations == replayed[0].replay.configurations


@pytest.mark.long
def test_a_recording_of_the_other_kind_of_forwards_is_replayed_and_that_is_said(
    recorded, tiny_spec, prompts_file, tmp_path
):
    shutil.copytree(recorded[0] / "traces", tmp_path / "traces")
    (file,) = tmp_path.glob("traces/*/recording.json")
    header = json.loads(file.read_text())
    header["pair"]["runner"]["compile"] = True
    file.write_text(json.dumps(header))
    search = [drafting(kind="fixed", max_tokens=2)]
    plan = plan_for(tiny_spec, prompts_file, search=search, race={"seconds": 0})
    heard = HeardSweep()
    result, _ = run_sweep(plan, tmp_path, observer=heard)
    assert result.replay.configurations == 1
    (warning,) = heard.warnings
    assert "of compiled forwards, and eager ones are timed" in warning


@pytest.mark.long
def test_optuna_is_answered_by_replay_too(recorded, tiny_spec, prompts_file):
    search = [drafting(kind="fixed", max_tokens={"randint": [1, 12]})]
    plan = plan_for(
        tiny_spec, prompts_file, search=search, method="optuna", trials=5, early_stopping=True
    )
    result, _ = run_sweep(plan, recorded[0])
    drafted = [t for t in result.trials if t.configuration.drafter]
    assert drafted
    assert all(t.replayed and t.finished for t in drafted)


@pytest.mark.long
def test_another_machine_ranks_without_timing_anything(recorded, tiny_spec, prompts_file):
    def ranked_for(draft_seconds):
        costs = {"draft": cost_of(draft_seconds)}
        profile = profile_of(cost_of(0.1), costs, device="far").model_dump()
        plan = plan_for(tiny_spec, prompts_file, search=SEARCH[1:-1], profile=profile)
        return run_sweep(plan, recorded[0])[0]

    cheap, dear = ranked_for(1e-6), ranked_for(10.0)
    for result in (cheap, dear):
        assert result.hardware == "far"
        assert result.timings == []
        assert result.autoregressive is None
    # Where drafting is free the fewest verifications win, where it is expensive no draft.
    fewest = min(
        (t for t in cheap.trials if t.may_win()), key=lambda t: t.metrics["verification_rate"]
    )
    assert cheap.champion == fewest.id
    assert dear.champion_trial.counts["n_draft"] == 0
    counts = Counts(**cheap.champion_trial.counts)
    seconds = counts.n_target * 0.1 + counts.n_draft * 1e-6
    assert cheap.champion_trial.metrics["estimated_speedup"] == pytest.approx(
        counts.n * 0.1 / seconds
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"traces": "nothing"},
            r"nothing: no such folder, and no recording of that name in .* \(there are: \S+\);"
            r" `specdec record` makes one",
        ),
        ({"max_new_tokens": 8}, r"recorded with other max_new_tokens \(24; the sweep has 8\)"),
        ({"sampling": {"temperature": 1, "coupling": "gumbel"}}, "recorded with other sampling"),
        ({"prompts": {"source": "others"}}, "recorded with other prompts"),
    ],
)
def test_a_recording_of_something_else_is_refused(
    recorded, tiny_spec, prompts_file, changes, message
):
    home, recording = recorded
    plan = plan_for(tiny_spec, prompts_file, **{"traces": recording.folder.name, **changes})
    digest = "0" * 64 if "prompts" in changes else recording.header.prompts.digest
    with pytest.raises(UserError, match=message) as caught:
        recording_of(plan, home, digest)
    assert "\n" not in str(caught.value)


def test_a_sweep_is_timed_in_the_data_types_of_the_recording_that_fits(
    prompts_file, recorded, tiny_spec
):
    """Measured anew, a near-tie of data types would hide the recording from its own sweep."""
    home, recording = recorded
    digest = recording.header.prompts.digest

    plan = plan_for(typed(tiny_spec, "auto"), prompts_file)
    found = fitting_recording(plan, home, digest)
    assert found.folder == recording.folder
    assert with_types_of(found, plan.pair).runner.draft_dtype == "float32"
    assert (
        fitting_recording(plan_for(typed(tiny_spec, "bfloat16"), prompts_file), home, digest)
        is None
    )


@pytest.mark.long
def test_auto_means_the_types_of_the_recording_and_not_what_is_faster_today(
    prompts_file, tiny_spec, tmp_path
):
    """bfloat16 is no faster for so small a pair, but the recording is in it."""

    recording_plan = RecordingPlan.model_validate(
        {
            "pair": typed(tiny_spec, "bfloat16").model_dump(),
            "prompts": {"source": str(prompts_file)},
            "max_new_tokens": TOKENS,
        }
    )
    recording = run_recording(recording_plan, tmp_path)
    small = [drafting(kind="fixed", max_tokens=[2, 3])]
    result, _ = run_sweep(plan_for(typed(tiny_spec, "auto"), prompts_file, search=small), tmp_path)
    assert result.pair.runner.target_dtype == result.pair.runner.draft_dtype == "bfloat16"
    assert result.replay.recording == str(recording.folder)


def test_a_recording_of_other_weights_is_refused_and_never_found(recorded, tiny_spec, prompts_file):
    home, recording = recorded
    # The target drafts for itself.
    swapped = tiny_spec.model_copy(update={"drafts": {"draft": tiny_spec.target}})
    small = [drafting(kind="fixed", max_tokens=3)]

    def opened(spec, named, **changes):
        plan = plan_for(spec, prompts_file, search=small, **changes)
        digest = recording.header.prompts.digest
        return open_replay(plan, home, spec, fingerprints(spec), named, digest, len(PROMPTS))

    with pytest.raises(UserError, match="recorded from other weights of draft"):
        opened(swapped, recording)
    assert opened(swapped, None) is None
    assert opened(tiny_spec, None, replay=False) is None
    assert opened(tiny_spec, None) is not None


def test_a_head_of_another_pair_is_refused(recorded, tiny_pair, prompts_file, tmp_path):
    save_random_head(tiny_pair, "t1", tmp_path / "head")
    swapped = tiny_pair.spec.model_copy(update={"drafts": {"draft": tiny_pair.spec.target}})
    search = [drafting(kind="decision", head=str(tmp_path / "head"))]
    plan = plan_for(swapped, prompts_file, search=search)
    with pytest.raises(UserError, match="trained for another draft model"):
        open_replay(plan, recorded[0], swapped, fingerprints(swapped), None, "0", len(PROMPTS))
