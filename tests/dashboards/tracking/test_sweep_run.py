"""MLflow shows a sweep completely and once, however often it was interrupted, and the champion
comes back as it was registered."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from dashboards.store import tracking_uri
from dashboards.tracking import registry
from dashboards.tracking.certificates import attach
from dashboards.tracking.registry import (
    CHALLENGER,
    PREVIOUS,
    appoint,
    find_champion,
    load_champion,
    load_registered,
    register,
)
from dashboards.tracking.sweep_run import SweepRun
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Sampling
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.decision import DecisionSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.retrieval import RetrievalSettings
from specdec_core.drafting.states import save_state
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.evidence.certificate.certificate import (
    Certificate,
    Checks,
    GreedyIdentity,
    LiveSpeed,
    SampledDistribution,
    find_certificate,
)
from specdec_core.models.fingerprints import fingerprints
from specdec_core.prompts.prompt_sets import Prompt, PromptSet
from specdec_core.search.folder import SweepFolder
from specdec_core.search.results import SweepResult, Trial

PROMPTS = [Prompt("a", "def f(x):"), Prompt("b", "import os")]


@pytest.fixture
def result(swept: tuple[SweepResult, Path]) -> SweepResult:
    return swept[0].model_copy(deep=True)


@pytest.fixture
def folder(swept: tuple[SweepResult, Path]) -> Path:
    return swept[1]


def runs(result: SweepResult) -> tuple[list[Run], list[Run]]:
    """Parent and nested runs of the pair's experiment."""
    client = MlflowClient(tracking_uri())
    experiment = client.get_experiment_by_name(result.pair.name)
    runs = client.search_runs([experiment.experiment_id])
    nested = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    return [run for run in runs if run not in nested], nested


def log(result: SweepResult, folder: Path) -> int | None:
    """A sweep that runs to its end: what was done before is in `result.trials`."""
    with SweepRun() as tracking:
        tracking.begun(result, PROMPTS, folder)
        return tracking.finish(result, folder)


def test_a_sweep_is_a_parent_run_with_a_nested_run_for_each_configuration(
    home: Path, result: SweepResult, folder: Path
) -> None:
    assert tracking_uri() == f"sqlite:///{home / 'mlflow.db'}"
    log(result, folder)
    (parent,), nested = runs(result)
    assert parent.info.run_id == result.mlflow_run_id
    assert {run.info.status for run in (parent, *nested)} == {"FINISHED"}
    assert {run.data.tags["config_id"] for run in nested} == {t.id for t in result.trials}
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parent.info.run_id}
    for run in nested:
        trial = result.trial(run.data.tags["config_id"])
        assert run.info.run_id == trial.mlflow_run_id
        assert run.data.metrics.items() >= (trial.metrics | trial.counts).items()
        assert run.data.tags["lossless"] == "true"
        assert run.data.tags["prompts_digest"] == result.prompts.digest
        assert run.data.tags["python"] == result.environment["python"]
    fixed = next(run for run in nested if run.info.run_name.endswith(", K=5"))
    assert fixed.data.params["drafter.policy.max_tokens"] == "5"
    note = fixed.data.tags["mlflow.note.content"]
    assert note.startswith("The draft model drafts 5 tokens a round.\n\n```yaml\ndrafter:\n")
    assert fixed.data.params["sampling.temperature"] == "0.0"


def test_runs_of_one_label_are_told_apart_by_their_ids(
    home: Path, result: SweepResult, folder: Path
) -> None:
    hybrids = [
        Configuration(drafter=HybridSettings(otherwise=SuffixSettings(), min_match=n))
        for n in (2, 3)
    ]
    first = result.trials[-1]
    twins = [first.model_copy(update={"configuration": hybrid}) for hybrid in hybrids]
    with SweepRun() as tracking:
        tracking.begun(result, PROMPTS, folder)
        for trial in twins:  # the first comes before anything is known of the second
            result.trials.append(trial)
            tracking.trial_finished(trial)
        tracking.finish(result, folder)
    _, nested = runs(result)
    names = {run.data.tags["config_id"]: run.info.run_name for run in nested}
    for hybrid in hybrids:
        assert names[hybrid.id] == f"suffix else suffix ({hybrid.id[:4]})"


def test_the_parent_has_files_prompts_and_the_champions_figures(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    (parent,), nested = runs(result)
    client = MlflowClient(tracking_uri())
    files = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert files >= {"sweep.json", "rounds.parquet"}
    assert Path(parent.info.artifact_uri.removeprefix("file://")).is_relative_to(home)
    (dataset,) = parent.inputs.dataset_inputs
    assert dataset.dataset.digest == result.prompts.digest[:36]
    best = next(t for t in result.timings if t.config_id == result.champion)
    assert parent.data.metrics["speedup"] == best.speedup
    timed = {r.data.tags["config_id"] for r in nested if "tokens_per_second" in r.data.metrics}
    assert timed == {t.config_id for t in (result.autoregressive, *result.timings) if t}


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "KILLED"), (RuntimeError("bug"), "FAILED")]
)
def test_an_interrupted_sweep_is_ended_and_goes_on_in_the_same_run(
    home: Path, result: SweepResult, folder: Path, error: BaseException, status: str
) -> None:
    trials = result.trials
    half = result.model_copy(update={"trials": trials[:4]})
    tracking = SweepRun()
    tracking.begun(half, PROMPTS, folder)
    with pytest.raises(type(error)), tracking:
        raise error
    (parent,), nested = runs(result)
    assert (parent.info.status, len(nested)) == (status, 4)

    with SweepRun() as tracking:
        tracking.begun(half, PROMPTS, folder)
        assert runs(result)[0][0].info.status == "RUNNING"
        for trial in trials[4:]:
            tracking.trial_finished(trial)
        tracking.finish(result, folder)
    (again,), nested = runs(result)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    assert len(nested) == len({run.data.tags["config_id"] for run in nested}) == len(trials)


def test_what_a_killed_process_left_half_logged_is_mended(
    home: Path, result: SweepResult, folder: Path
) -> None:
    """kill -9 between creating a configuration's run and finishing it: nobody ends the runs."""
    killed = SweepRun()
    killed.begun(result.model_copy(update={"trials": result.trials[:2]}), PROMPTS, folder)
    half = result.trials[2]
    killed.client.create_run(
        killed.experiment_id,
        tags={"mlflow.parentRunId": killed.run_id, "config_id": half.id},
    )
    log(result, folder)
    (parent,), nested = runs(result)
    assert {run.info.status for run in (parent, *nested)} == {"FINISHED"}
    assert len(nested) == len(result.trials)
    mended = next(run for run in nested if run.data.tags["config_id"] == half.id)
    assert mended.data.metrics.items() >= half.metrics.items()


def test_the_runs_of_a_killed_sweep_that_nobody_resumes_are_ended_by_the_next_one(
    home: Path, result: SweepResult, folder: Path, tmp_path: Path
) -> None:
    (killed, alive), runs_of = (tmp_path / "killed", tmp_path / "alive"), {}
    for path in (killed, alive):
        SweepFolder(path).finish()
        half = result.model_copy(update={"trials": result.trials[:1]})
        sweep = SweepRun()
        sweep.begun(half, PROMPTS, path)
        sweep.delivery.settle(60)
        sweep.client.create_run(
            sweep.experiment_id, tags={"mlflow.parentRunId": sweep.run_id, "config_id": "x"}
        )
        runs_of[path] = sweep.run_id
        result.mlflow_run_id = None
    with SweepFolder(alive).lock():
        log(result, folder)
        parents, nested = runs(result)
    status = {run.info.run_id: run.info.status for run in parents}
    assert (status[runs_of[killed]], status[runs_of[alive]]) == ("KILLED", "RUNNING")
    left = {
        run.data.tags["mlflow.parentRunId"]: run.info.status
        for run in nested
        if run.data.tags["config_id"] == "x"
    }
    assert left == {runs_of[killed]: "KILLED", runs_of[alive]: "RUNNING"}


def test_a_finished_sweep_run_anew_is_another_parent(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    log(result.model_copy(update={"mlflow_run_id": None}), folder)
    assert len(runs(result)[0]) == 2


def test_the_champion_comes_back_as_it_was_registered(
    home: Path, result: SweepResult, folder: Path
) -> None:
    assert log(result, folder) == 1
    pair, configuration, version = load_champion()
    assert (pair, configuration, version) == (result.pair, result.champion_trial.configuration, 1)
    assert load_champion(result.pair.name) == (pair, configuration, version)


def test_promoting_moves_the_alias_and_promoting_again_makes_no_new_version(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    other = next(t for t in result.trials if t.id != result.champion)
    assert register(result, other.id) == 2
    assert load_champion()[1:] == (other.configuration, 2)
    assert result.champion is not None
    assert register(result, result.champion) == 1
    assert load_champion()[1:] == (result.champion_trial.configuration, 1)


def test_a_version_says_whether_it_is_certified_and_its_certificate_comes_with_it(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    name, configuration = result.pair.name, result.champion_trial.configuration
    client = MlflowClient(tracking_uri())
    assert client.get_model_version(name, "1").tags["certified"] == "false"
    certificate = certificate_of(result.pair, configuration)
    path = certificate.save()
    assert attach(certificate) == [1]
    tags = client.get_model_version(name, "1").tags
    assert (tags["certified"], tags["certificate"]) == ("true", certificate.id)
    path.unlink()
    load_champion()
    assert find_certificate(result.pair, configuration) == certificate


def test_a_certificate_of_other_weights_makes_way_for_the_versions_own(
    home: Path, result: SweepResult, folder: Path
) -> None:
    """The weights changed, and another machine certified them."""
    log(result, folder)
    certificate = certificate_of(result.pair, result.champion_trial.configuration)
    assert attach(certificate) == [1]
    stale = dict.fromkeys(certificate.fingerprints, "0" * 16)
    certificate.model_copy(update={"fingerprints": stale}).save()
    load_champion()
    assert find_certificate(result.pair, certificate.configuration) == certificate


def test_the_champion_before_is_kept_as_previous_and_a_challenger_beside_it(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    name = result.pair.name
    other = next(t for t in result.trials if t.id != result.champion)
    assert register(result, other.id, alias=CHALLENGER) == 2
    assert load_champion().version == 1
    assert load_registered(name, CHALLENGER).configuration == other.configuration
    with pytest.raises(UserError, match="no previous of"):
        load_registered(name, PREVIOUS)
    appoint(name, 2)
    assert load_champion().version == 2
    assert load_registered(name, PREVIOUS).version == 1
    assert load_registered(name, 1).configuration == result.champion_trial.configuration
    with pytest.raises(UserError, match="no version 9 of"):
        load_registered(name, 9)


def certificate_of(pair: PairSpec, configuration: Configuration) -> Certificate:
    """One that says little of the pair's weights."""
    return Certificate(
        pair=pair,
        fingerprints=fingerprints(pair),
        configuration=configuration,
        prompts=PromptSet.of("here", PROMPTS),
        max_new_tokens=4,
        checks=Checks(
            greedy=GreedyIdentity(prompts=2, tokens=8, slots=4, differing=0),
            sampled=SampledDistribution(
                sampling=Sampling(temperature=1.0), texts=2, tokens=6, level=1e-3, favours=()
            ),
            speed=LiveSpeed(
                prompts=2,
                repeats=1,
                ratio=1.5,
                low=1.2,
                high=1.8,
                tokens_per_second=100.0,
                target_dtype="float32",
                draft_dtype="float32",
            ),
        ),
        issued=datetime(2026, 1, 2, tzinfo=UTC),
        environment={},
    )


def test_without_a_name_the_pair_promoted_last_is_loaded(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    other_pair = result.pair.model_copy(update={"target": "elsewhere/other"})
    other = result.model_copy(update={"pair": other_pair, "mlflow_run_id": None}, deep=True)
    log(other, folder)
    assert load_champion()[0] == other_pair
    register(result, result.champion)
    assert load_champion()[0] == result.pair
    assert load_champion(other_pair.name)[0] == other_pair


def test_champions_of_others_in_the_same_store_are_none_of_ours(
    home: Path, result: SweepResult, folder: Path
) -> None:
    """More models than a page of the registry holds come first, one with a champion."""
    client = MlflowClient(tracking_uri())
    for number in range(101):
        client.create_registered_model(f"another-{number}")
    client.create_model_version("another-0", source=str(home))
    client.set_registered_model_alias("another-0", "champion", "1")
    assert find_champion() is None
    log(result, folder)
    assert find_champion() == load_champion() == load_champion(result.pair.name)


def with_a_head(home: Path, result: SweepResult) -> tuple[Path, Trial]:
    """A head of the workspace, and a trial that uses it."""
    head = home / "heads" / "mine"
    head.mkdir(parents=True)
    (head / "head.json").write_text("a card")
    (head / "model.safetensors").write_bytes(b"weights")
    trial = next(t for t in result.trials if t.mlflow_run_id)
    trial.configuration = Configuration(
        drafter=DraftModelSettings(policy=DecisionSettings(head="mine"))
    )
    return head, trial


def test_a_champions_head_comes_with_it(home: Path, result: SweepResult, folder: Path) -> None:
    log(result, folder)
    head, trial = with_a_head(home, result)
    register(result, trial.id)
    shutil.rmtree(head)
    assert load_champion()[1] == trial.configuration
    assert (head / "head.json").read_text() == "a card"
    assert (head / "model.safetensors").read_bytes() == b"weights"


def test_a_head_that_was_trained_anew_since_it_was_registered_is_told_of(
    home: Path, result: SweepResult, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log(result, folder)
    head, trial = with_a_head(home, result)
    version = register(result, trial.id)
    load_champion()
    assert "other weights" not in caplog.text
    (head / "model.safetensors").write_bytes(b"others")
    load_champion()
    [line] = [line for line in caplog.messages if "other weights" in line]
    assert line.startswith(f"version {version} of {result.pair.name} ")
    assert "weights of head mine than" in line


def test_a_champions_datastores_come_with_it_unless_they_are_given_by_path(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    elsewhere = home / "elsewhere" / "theirs"
    stores = [home / "datastores" / "mine", home / "datastores" / "other", elsewhere]
    for store in stores:
        store.mkdir(parents=True)
        (store / "datastore.json").write_text(store.name)
        (store / "tokens.npy").write_bytes(b"tokens")
    lookup = RetrievalSettings(datastore="mine")
    arms = [RetrievalSettings(datastore="other"), RetrievalSettings(datastore=str(elsewhere))]
    trial = next(t for t in result.trials if t.mlflow_run_id)
    trial.configuration = Configuration(
        drafter=HybridSettings(lookup=lookup, otherwise=BanditSettings(arms=arms))
    )
    register(result, trial.id)
    for store in stores:
        shutil.rmtree(store)
    assert load_champion()[1] == trial.configuration
    for store in stores[:2]:
        assert (store / "datastore.json").read_text() == store.name
        assert (store / "tokens.npy").read_bytes() == b"tokens"
    assert not elsewhere.exists()


def test_a_champion_registered_without_its_datastore_is_loaded(
    home: Path, result: SweepResult, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(result, folder)
    trial = next(t for t in result.trials if t.mlflow_run_id)
    trial.configuration = Configuration(drafter=RetrievalSettings(datastore="mine"))
    with pytest.raises(UserError, match=r"datastores/mine: missing"):
        register(result, trial.id)
    with monkeypatch.context() as before:
        before.setattr(registry, "_workspace_files", lambda _: {})
        register(result, trial.id)
    assert load_champion()[1] == trial.configuration
    assert not (home / "datastores").exists()


def test_a_champions_arms_come_with_their_heads_and_what_was_learned(
    home: Path, result: SweepResult, folder: Path
) -> None:
    log(result, folder)
    arms = [{"kind": "decision", "head": name} for name in ("one", "two")]
    bandit = BanditSettings(arms=arms)
    state = save_state(build_bandit(bandit).state(), home / "bandits" / "served" / "known.json")
    for name in ("one", "two"):
        (home / "heads" / name).mkdir(parents=True)
        (home / "heads" / name / "head.json").write_text(name)
    trial = next(t for t in result.trials if t.mlflow_run_id)
    trial.configuration = Configuration(drafter=bandit.model_copy(update={"state": "served/known"}))
    register(result, trial.id)
    learned = state.read_text()
    shutil.rmtree(home / "heads")
    shutil.rmtree(home / "bandits")
    assert load_champion()[1] == trial.configuration
    assert state.read_text() == learned
    for name in ("one", "two"):
        assert (home / "heads" / name / "head.json").read_text() == name


def test_champions_with_heads_and_learned_states_are_registered_under_their_pairs_names(
    home: Path, result: SweepResult, folder: Path
) -> None:
    (home / "heads" / "mine").mkdir(parents=True)
    (home / "heads" / "mine" / "head.json").write_text("a card")
    asking = DraftModelSettings(policy=DecisionSettings(head="mine"))
    learning = BanditSettings(arms=[{"kind": "fixed", "max_tokens": 2}, {"kind": "svip"}])
    save_state(build_bandit(learning).state(), home / "bandits" / "served" / "known.json")
    learning = learning.model_copy(update={"state": "served/known"})
    other = result.pair.model_copy(update={"target": "elsewhere/other"})
    champions = [
        (result.pair, Configuration(drafter=asking)),
        (other, Configuration(drafter=learning)),
    ]
    for pair, configuration in champions:
        renamed = result.model_copy(update={"pair": pair}, deep=True)
        trial = renamed.champion_trial
        trial.configuration = configuration
        renamed.champion = trial.id
        log(renamed, folder)
    models = MlflowClient(tracking_uri()).search_registered_models()
    assert {model.name for model in models} == {pair.name for pair, _ in champions}
    for pair, configuration in champions:
        assert load_champion(pair.name) == (pair, configuration, 1)


def test_no_champion_yet_is_one_line_and_creates_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    with pytest.raises(UserError, match="`specdec sweep` finds one") as caught:
        load_champion()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_models_champion_is_one_line(home: Path) -> None:
    with pytest.raises(UserError, match="no champion of nothing"):
        load_champion("nothing")
    with pytest.raises(UserError, match="no champion in"):
        load_champion()


def test_a_store_that_cannot_be_used_is_one_line(
    home: Path, result: SweepResult, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://store")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
        log(result, folder)


def test_the_global_tracking_store_is_left_alone(
    home: Path, result: SweepResult, folder: Path
) -> None:
    before = mlflow.get_tracking_uri()
    log(result, folder)
    load_champion()
    assert mlflow.get_tracking_uri() == before


# Replayed


def replayed(result: SweepResult, more: int) -> SweepResult:
    """The sweep as if it had replayed its fixed K, and `more` of them."""
    model = next(t for t in result.trials if t.configuration.family == "fixed")
    for trial in result.trials:
        trial.replayed = trial.configuration.family == "fixed"
        trial.mlflow_run_id = None  # its run is in the store of the sweep itself
    for number in range(more):
        policy = FixedSettings(max_tokens=20 + number)
        drafter = model.configuration.drafter.model_copy(update={"policy": policy})
        configuration = model.configuration.model_copy(update={"drafter": drafter})
        slow = model.metrics | {"estimated_speedup": 0.5 - number / 1000}
        update = {"configuration": configuration, "metrics": slow}
        result.trials.append(model.model_copy(update=update, deep=True))
    return result


def test_of_many_replayed_configurations_the_notable_are_runs_and_all_are_in_a_table(
    home: Path, result: SweepResult, folder: Path
) -> None:
    result = replayed(result, more=60)
    done = result.model_copy(update={"champion": None})  # as it is before anything is timed
    with SweepRun() as tracking:
        tracking.begun(done, PROMPTS, folder)
        tracking.counted(done)
        result.mlflow_run_id = done.mlflow_run_id
        tracking.finish(result, folder)
    (parent,), nested = runs(result)
    logged = {run.data.tags["config_id"]: run for run in nested}
    live = {t.id for t in result.trials if not t.replayed}
    assert live <= logged.keys()
    assert logged.keys() - live == {t.id for t in result.notable() if t.replayed}
    assert len(logged) < len(result.trials)
    for config_id, run in logged.items():
        assert run.data.tags["counted"] == ("live" if config_id in live else "replay")
    table = mlflow.artifacts.load_text(f"{parent.info.artifact_uri}/configurations.csv")
    assert len(table.splitlines()) == 1 + len(result.trials)

    left = next(t for t in result.trials if t.id not in logged)
    register(result, left.id)
    assert load_champion(result.pair.name)[1] == left.configuration
    assert left.id in {run.data.tags["config_id"] for run in runs(result)[1]}


def test_what_is_estimated_for_another_machine_is_not_registered(
    home: Path, result: SweepResult, folder: Path
) -> None:
    result = result.model_copy(
        update={"hardware": "far away", "timings": [], "autoregressive": None}
    )
    assert log(result, folder) is None
    (parent,), _ = runs(result)
    assert parent.data.tags["estimated_for"] == "far away"
    assert parent.data.tags["champion"] == result.champion
    with pytest.raises(UserError, match="no champion"):
        load_champion()


def test_what_was_chosen_for_all_loads_is_registered(
    home: Path, under_load: SweepResult, folder: Path
) -> None:
    result = under_load.model_copy(deep=True)
    choice = result.under_load
    assert choice is not None
    assert choice.chosen.family == "schedule"
    version = log(result, folder)
    assert load_champion()[1:] == (choice.chosen, version)
    (parent,), _ = runs(result)
    assert parent.data.tags["champion"] == choice.chosen.id
    metrics = parent.data.metrics
    assert metrics["simulation_error_value"] == pytest.approx(choice.errors()["value"])
    client = MlflowClient(tracking_uri())
    steps = client.get_metric_history(parent.info.run_id, "load_speedup")
    assert {metric.step for metric in steps} == {1, 8}
    figures = [file.path for file in client.list_artifacts(parent.info.run_id, "figures")]
    assert {"figures/simulation.html", "figures/simulation.csv"} <= set(figures)
    registered = client.get_model_version_by_alias(result.pair.name, "champion")
    assert "8 clients: autoregressive" in registered.description
