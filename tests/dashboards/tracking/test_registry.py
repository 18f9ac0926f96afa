"""The registered champion is loaded unchanged, with the files that it needs."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.tracking._tracking_service import utils

from dashboards.store import tracking_uri
from dashboards.tracking import registry
from dashboards.tracking.certificates import attach
from dashboards.tracking.registry import (
    CHAMPION,
    PREVIOUS,
    _copy,
    appoint,
    find_champion,
    load_champion,
    load_registered,
    register,
)
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.heads import DecisionSettings
from specdec_core.drafting.states import save_state
from specdec_core.evidence.certificate.certificate import (
    Certificate,
    CertifiedServer,
    Checks,
    GreedyIdentity,
    LiveSpeed,
    SampledDistribution,
    certificate_path,
    find_certificate,
)
from specdec_core.models.fingerprints import fingerprints
from specdec_core.prompts.prompt_sets import PromptSet
from tests.dashboards.tracking.test_sweep_run import PROMPTS, log


@pytest.fixture(scope="module")
def workspace_with_runs(swept, empty_store, tmp_path_factory):
    """A logged sweep with a registered champion, and its workspace."""
    result, home = swept[0].model_copy(deep=True), tmp_path_factory.mktemp("logged")
    shutil.copy(empty_store, home / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(home))
        assert log(result, Path(shutil.copytree(swept[1], home / "sweep"))) == 1
    return result, home


@pytest.fixture
def logged(workspace_with_runs, home):
    """The same sweep, in a copy of its workspace: `home`."""
    result, made = workspace_with_runs
    utils._artifact_repos_cache.clear()  # as in a new process: the runs are in another place
    shutil.copytree(made, home, dirs_exist_ok=True)
    return result.model_copy(deep=True)


def test_the_champion_comes_back_as_it_was_registered(logged):
    pair, configuration, version = load_champion()
    assert (pair, configuration, version) == (logged.pair, logged.champion_trial.configuration, 1)
    assert load_registered(logged.pair.name, CHAMPION) == (pair, configuration, version)


def test_promoting_moves_the_alias_and_promoting_again_makes_no_new_version(home, logged):
    other = next(t for t in logged.trials if t.id != logged.champion)
    assert register(logged, other.id) == 2
    assert load_champion()[1:] == (other.configuration, 2)
    assert register(logged, logged.champion) == 1
    assert load_champion()[1:] == (logged.champion_trial.configuration, 1)


def test_a_version_says_whether_it_is_certified_and_its_certificate_comes_with_it(home, logged):
    name, configuration = logged.pair.name, logged.champion_trial.configuration
    client = MlflowClient(tracking_uri())
    assert client.get_model_version(name, "1").tags["certified"] == "false"
    certificate = certificate_of(logged.pair, configuration)
    path = certificate.save()
    assert attach(certificate) == [f"version 1 of {name}"]
    tags = client.get_model_version(name, "1").tags
    assert (tags["certified"], tags["certificate"]) == ("true", certificate.id)
    path.unlink()
    load_champion()
    assert find_certificate(logged.pair, configuration) == certificate
    in_vllm = CertifiedServer(name="vllm", version="1", settings={}, reference="itself")
    inside = certificate.model_copy(update={"server": in_vllm})
    inside.save()
    assert register(logged, logged.champion, alias="challenger", server="vllm") == 1
    tags = client.get_model_version(f"{name}-vllm", "1").tags
    assert (tags["certified.vllm"], tags["certified"]) == ("true", "true")
    certificate_path(logged.pair, configuration, "vllm").unlink()
    assert attach(inside) == [f"version 1 of {name}", f"version 1 of {name}-vllm"]
    load_champion()
    assert find_certificate(logged.pair, configuration, "vllm") == inside
    # The weights changed, and another machine certified them.
    stale = dict.fromkeys(certificate.fingerprints, "0" * 16)
    certificate.model_copy(update={"fingerprints": stale}).save()
    load_champion()
    assert find_certificate(logged.pair, configuration) == certificate


def test_a_version_is_certified_on_the_weights_that_it_is_registered_with_alone(
    home, logged, monkeypatch, caplog
):
    name, client = logged.pair.name, MlflowClient(tracking_uri())
    certificate = certificate_of(logged.pair, logged.champion_trial.configuration)
    others = dict.fromkeys(certificate.fingerprints, "0" * 16)
    assert attach(certificate.model_copy(update={"fingerprints": others})) == []
    assert f"version 1 of {name} was registered with other weights" in caplog.text
    assert client.get_model_version(name, "1").tags["certified"] == "false"
    assert attach(certificate) == [f"version 1 of {name}"]
    monkeypatch.setattr(registry, "weights_here", lambda *_: others)  # trained since
    assert register(logged, logged.champion) == 1
    tags = client.get_model_version(name, "1").tags
    assert tags["certified"] == "false"
    assert "certificate" not in tags


def test_the_champion_before_is_kept_as_previous_and_a_challenger_beside_it(home, logged):
    name = logged.pair.name
    other = next(t for t in logged.trials if t.id != logged.champion)
    assert register(logged, other.id, alias="challenger") == 2
    assert load_champion().version == 1
    assert load_registered(name, "challenger").configuration == other.configuration
    with pytest.raises(UserError, match="no previous of"):
        load_registered(name, PREVIOUS)
    appoint(name, 2)
    assert load_champion().version == 2
    assert load_registered(name, PREVIOUS).version == 1
    assert load_registered(name, 1).configuration == logged.champion_trial.configuration
    with pytest.raises(UserError, match="no version 9 of"):
        load_registered(name, 9)


def certificate_of(pair, configuration):
    """One that says little of the pair's weights."""
    dtypes = {"target_dtype": "float32", "draft_dtype": "float32"}
    times = {"ratio": 1.5, "low": 1.2, "high": 1.8, "tokens_per_second": 100.0}
    drawn = SampledDistribution(
        sampling=Sampling(temperature=1.0), texts=2, tokens=6, level=1e-3, favours=()
    )
    return Certificate(
        pair=pair,
        fingerprints=fingerprints(pair),
        configuration=configuration,
        prompts=PromptSet.of("here", PROMPTS),
        max_new_tokens=4,
        checks=Checks(
            greedy=GreedyIdentity(prompts=2, tokens=8, slots=4, differing=0),
            sampled=drawn,
            speed=LiveSpeed(prompts=2, repeats=1, **times, **dtypes),
        ),
        issued=datetime(2026, 1, 2, tzinfo=UTC),
        environment={},
    )


def test_without_a_name_the_pair_promoted_last_is_loaded(logged, folder):
    other_pair = logged.pair.model_copy(update={"target": "elsewhere/other"})
    other = logged.model_copy(update={"pair": other_pair, "mlflow_run_id": None}, deep=True)
    log(other, folder)
    assert load_champion()[0] == other_pair
    register(logged, logged.champion)
    assert load_champion()[0] == logged.pair
    assert load_registered(other_pair.name, CHAMPION)[0] == other_pair


def test_champions_of_others_in_the_same_store_are_none_of_ours(home, swept, folder):
    """More models than a page of the registry holds come first, one with a champion."""
    client = MlflowClient(tracking_uri())
    for number in range(101):
        client.create_registered_model(f"another-{number}")
    client.create_model_version("another-0", source=str(home))
    client.set_registered_model_alias("another-0", "champion", "1")
    assert find_champion() is None
    with pytest.raises(UserError, match="no champion of nothing"):
        load_registered("nothing", CHAMPION)
    with pytest.raises(UserError, match="no champion in"):
        load_champion()
    result = swept[0].model_copy(deep=True)
    log(result, folder)
    assert find_champion() == load_champion() == load_registered(result.pair.name, CHAMPION)


def test_the_files_of_a_champion_come_with_it_unless_they_are_given_by_path(home, logged):
    """Heads and what a bandit has learned, of a drafter in a drafter."""
    elsewhere = home / "elsewhere" / "theirs"
    folders = [home / "heads" / "one", home / "heads" / "two", home / "heads" / "three"]
    for folder in (*folders, elsewhere):
        folder.mkdir(parents=True)
        (folder / "head.json").write_text(folder.name)
    arms = [
        DraftModelSettings(policy=DecisionSettings(head="one")),
        DraftModelSettings(policy=DecisionSettings(head="two")),
        DraftModelSettings(policy=DecisionSettings(head="three")),
        DraftModelSettings(policy=DecisionSettings(head=str(elsewhere))),
    ]
    bandit = BanditSettings(arms=arms)
    state = save_state(build_bandit(bandit).state(), home / "bandits" / "served" / "known.json")
    learned = state.read_text()
    drafter = HybridSettings(otherwise=bandit.model_copy(update={"state": "served/known"}))
    trial = logged.trials[1]
    trial.configuration = Configuration(drafter=drafter)
    register(logged, trial.id)
    for name in ("heads", "bandits", "elsewhere"):
        shutil.rmtree(home / name)
    assert load_champion().configuration == trial.configuration
    for folder in folders:
        [file] = folder.iterdir()
        assert file.read_text() == folder.name
    assert state.read_text() == learned
    assert not elsewhere.exists()


def with_a_head(home, logged):
    """A head of the workspace, and a trial that uses it."""
    head = home / "heads" / "mine"
    head.mkdir(parents=True)
    (head / "head.json").write_text("a card")
    (head / "model.safetensors").write_bytes(b"weights")
    trial = logged.trials[1]
    trial.configuration = Configuration(
        drafter=DraftModelSettings(policy=DecisionSettings(head="mine"))
    )
    return head, trial


def test_a_head_that_was_trained_anew_since_it_was_registered_is_told_of(home, logged, caplog):
    head, trial = with_a_head(home, logged)
    version = register(logged, trial.id)
    load_champion()
    assert "other weights" not in caplog.text
    (head / "model.safetensors").write_bytes(b"others")
    load_champion()
    [line] = [line for line in caplog.messages if "other weights" in line]
    assert line.startswith(f"version {version} of {logged.pair.name} ")
    assert "weights of head mine than" in line


def test_a_champion_registered_without_its_head_is_loaded(home, logged, monkeypatch):
    trial = logged.trials[1]
    policy = DecisionSettings(head="mine")
    trial.configuration = Configuration(drafter=DraftModelSettings(policy=policy))
    with pytest.raises(UserError, match=r"heads/mine: missing"):
        register(logged, trial.id)
    with monkeypatch.context() as before:
        before.setattr(registry, "_workspace_files", lambda _: {})
        register(logged, trial.id)
    assert load_champion()[1] == trial.configuration
    assert not (home / "heads").exists()


def test_a_copy_that_ends_half_way_leaves_nothing_to_be_taken_for_whole(tmp_path):
    source, head = tmp_path / "artifact", tmp_path / "heads" / "small"
    source.mkdir()
    (source / "head.json").write_text("{}")
    (source / "model.safetensors").symlink_to("lost")
    with pytest.raises(shutil.Error):
        _copy(source, head)
    assert not head.exists()
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").write_bytes(b"weights")
    _copy(source, head)
    assert sorted(file.name for file in head.iterdir()) == ["head.json", "model.safetensors"]
    assert [folder.name for folder in head.parent.iterdir()] == ["small"]
