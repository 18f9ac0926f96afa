"""A workspace of version 0.1.0 (`data/workspace-0.1.0.tar.xz`) stays readable: its pair, recording,
sweep, bandits' states and registered champion. That version's own commands wrote it."""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path

import pytest

from specdec_core.config import PairSpec
from specdec_core.drafting.states import find_state
from specdec_core.models.pair import load_pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.folder import SweepFolder, find_trial
from specdec_core.search.results import SweepResult

ARCHIVE = Path(__file__).parent / "data" / "workspace-0.1.0.tar.xz"
SWEEP, RECORDING = "target-draft-2944a658", "target-draft-a3f85066"
BANDIT = "2d1d861205"  # the champion: UCBSpec of two fixed K, SVIP and suffix


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace, unpacked where its files now say that it is."""
    root = tmp_path_factory.mktemp("before")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    home = root / "workspace"
    for file in home.rglob("*"):
        if file.suffix in (".json", ".yaml", ".sql", ".csv"):
            file.write_text(file.read_text().replace("@HOME@", str(home)))
    database = sqlite3.connect(home / "mlflow.db")
    database.executescript((home / "mlflow.sql").read_text())
    database.close()
    return home


@pytest.fixture
def inside(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as the current workspace; its models have relative names."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return home


def test_configurations_keep_their_ids(inside: Path) -> None:
    folder = SweepFolder(inside / "sweeps" / SWEEP)
    files = {file.stem for file in (folder.path / "trials").glob("*.json")}
    assert {trial.id for trial in folder.trials()} == files
    result = SweepResult.load(folder.path)
    assert {trial.id for trial in result.trials} >= files
    assert find_trial(inside / "sweeps", BANDIT[:4])[1].id == BANDIT


def test_a_sweep_reads_as_it_was_written(inside: Path) -> None:
    folder = SweepFolder(inside / "sweeps" / SWEEP)
    result = folder.result()
    assert folder.finished
    assert result is not None
    assert result.champion_trial.configuration.drafter is None
    assert len(result.trials) == 8
    assert len(result.timings) == 2
    assert folder.pair() == result.pair
    assert folder.profile() is not None


def test_a_recording_replays_to_the_counts_it_gave_but_for_first_rounds(inside: Path) -> None:
    """That version drafted in the round that reads a prompt to its end, too."""
    replay = Replay(Recording.open(inside / "traces" / RECORDING))
    result = SweepResult.load(inside / "sweeps" / SWEEP)
    replayed = [trial for trial in result.trials if trial.replayed]
    assert len(replayed) == 7
    for trial in replayed:
        counts = replay.run(trial.configuration).counts.as_dict()
        for same in ("requests", "n"):
            assert counts[same] == trial.counts[same]
        more = counts["n_target"] - trial.counts["n_target"]
        assert 0 <= more <= counts["requests"]


def test_bandits_go_on_from_their_states(inside: Path) -> None:
    from specdec_core.config import Configuration, load_yaml
    from specdec_core.drafting.bandit.drafter import build_bandit

    file = load_yaml(inside / "bandits.yaml")
    for state, rule, rounds in (("0074b4dda5", "exp3", 52), ("900b58168d", "ucb", 54)):
        own = next(b for b in file["bandits"] if b["rule"] == rule)
        drafter = {"kind": "bandit", "arms": file["arms"], "state": f"bandits-target-draft/{state}"}
        configuration = Configuration.model_validate({"drafter": {**drafter, **own}})
        assert find_state(configuration.drafter.state).exists()
        bandit = build_bandit(configuration.drafter)
        assert sum(bandit.rounds) == rounds
        assert (bandit.frame()["rounds"] > 0).all()


def test_serving_goes_on_from_what_it_had_learned(inside: Path) -> None:
    from cluster.serving.deployment import learned_state

    result = SweepResult.load(inside / "sweeps" / SWEEP)
    path = learned_state(result.pair, result.trial(BANDIT).configuration)
    assert path is not None
    assert path.exists()


def test_the_registered_champion_is_found(inside: Path) -> None:
    from dashboards.tracking.registry import load_champion

    pair, configuration, version = load_champion()
    assert configuration.id == BANDIT
    assert isinstance(pair, PairSpec)
    assert pair.drafts == {"draft": "models/draft"}
    assert str(version) == "2"
    assert load_pair(pair).max_length == 256
