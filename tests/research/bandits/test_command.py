"""`specdec lab bandits` compares bandits with their arms, live or by replay; bad input fails."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml
from mlflow import MlflowClient

from jobs.console import run
from research.bandits import __main__ as bandits
from specdec_core.config import PairSpec, load_yaml, parse
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.models.pair import Pair
from specdec_core.recordings.find import FINISHED
from tests.dashboards.conftest import record

ARMS = [1, 4, {"kind": "prompt_lookup"}]
HARDWARE = {"name": "far away", "target": 0.1, "drafts": {"*": 0.01}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_spec: PairSpec) -> Path:
    """A workspace with a plan, prompts and a hardware file."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    plan = {
        "pair": tiny_spec.model_dump(mode="json"),
        "arms": ARMS,
        "bandits": [{}, {"rule": "exp3"}, {"reward": "time"}],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    (tmp_path / "h.yaml").write_text(json.dumps(HARDWARE))
    for name in ("a", "b"):
        lines = (json.dumps({"prompt": f"{name} {i} = {i}"}) for i in range(3))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def command(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        given = [] if "--config" in arguments else ["--config", home / "plan.yaml"]
        monkeypatch.setattr(sys, "argv", ["bandits", *map(str, [*arguments, *given])])
        with pytest.raises(SystemExit) as exit:
            run(bandits.main)
        return exit.value.code, *capsys.readouterr()

    return call


def test_prompts_of_several_sets_are_decoded_in_turn(command, home: Path) -> None:
    code, output, error = command(
        *("--prompts", home / "a.jsonl", "--prompts", home / "b.jsonl", "--limit", 2),
        *("--max-new-tokens", 16, "--repeats", 1, "--slots", 2, "--name", "mine"),
    )
    assert code == 0, error
    for shown in ("UCB of", "EXP3 of", "over the", "the best single arm", "4 prompts"):
        assert shown in output
    folder = home / "bandits" / "mine"
    table = pd.read_csv(folder / "table.csv").set_index("name")
    assert list(table["kind"]) == ["baseline", *["arm"] * 3, *["bandit"] * 3]
    rounds = pd.read_parquet(folder / "rounds.parquet")
    plain = rounds[rounds["name"] == "autoregressive"]
    assert plain.groupby("turn")["request"].nunique().tolist() == [2, 2]
    text = (folder / "bandits.md").read_text()
    assert len(re.findall(r"\n\| (?:\*\*)?UCB of", text)) == 6  # two rules, in three tables
    assert "data-plot" in (folder / "bandits.html").read_text()

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments() if e.name != "Default"]
    (logged,) = client.search_runs(experiments)
    assert logged.info.status == "FINISHED"
    assert logged.data.tags["counted"] == "live"
    assert logged.data.metrics["UCB_of_3_arms.mat"] == pytest.approx(
        table.loc["UCB of 3 arms", "mat"]
    )
    files = {file.path for file in client.list_artifacts(logged.info.run_id)}
    assert {"bandits.html", "table.csv", "rounds.parquet", "figures"} <= files

    # what was learned is a state to start from
    drafters = [BanditSettings(arms=ARMS), BanditSettings(arms=ARMS, rule="exp3")]
    for drafter in drafters:
        [state] = (
            path
            for path in folder.glob("*.json")
            if json.loads(path.read_text())["rule"] == drafter.rule
            and json.loads(path.read_text())["reward"] == "tokens"
        )
        named = drafter.model_copy(update={"state": f"mine/{state.stem}"})
        assert sum(build_bandit(named).rounds) > 0


def test_a_recording_is_replayed_with_the_times_of_other_hardware(
    command, home: Path, tiny_pair: Pair
) -> None:
    folder = record(tiny_pair, home / "traces" / "known")
    (folder / FINISHED).touch()
    code, output, error = command("--traces", folder, "--hardware", home / "h.yaml")
    assert code == 0, error
    assert "replayed, 4 prompts" in output
    assert "far away" in output
    table = pd.read_csv(home / "bandits" / "plan-known" / "table.csv").set_index("name")
    assert table.loc["autoregressive", "tokens_per_second"] == pytest.approx(10)
    k4 = table.loc["draft, K=4"]
    assert k4["tokens_per_second"] < k4["mat"] / 0.1
    # by --traces alone nothing is decoded, and the recording is also found by its name
    code, again, error = command("--traces", "known", "--hardware", home / "h.yaml")
    assert code == 0, error
    assert [line for line in again.splitlines() if "UCB of" in line] == [
        line for line in output.splitlines() if "UCB of" in line
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "x", "--prompts", "y"], "replays its own prompts"),
        (["--traces", "x", "--slots", "2"], "replays its own prompts"),
        (["--traces", "x", "--chat-template", "none"], "replays what was read"),
        (["--traces", "x", "--max-length", "64"], "replays what was read"),
        (["--hardware", "h.yaml"], "give --traces too"),
        (["--traces", "x", "--hardware", "h", "--profile", "p"], "give one"),
        (["--traces", "none"], "no such folder, and no recording of that name"),
        (["--name", "a/b"], "expected a folder's name"),
        (["--prompts", "none.jsonl"], "none.jsonl: no such file"),
        (["--config", "none.yaml"], "none.yaml: no such file"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(
    command, home: Path, arguments: list[str], message: str
) -> None:
    code, _, error = command(*arguments)
    assert code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", error)
    assert not (home / "bandits").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": [4]}, "at least two arms"),
        ({"arms": [1, {"kind": "tree", "draft": "none"}]}, "none"),
        ({"bandits": [{"state": "nowhere"}]}, "no saved state can be read"),
        (
            {
                "arms": [
                    {"drafter": {"kind": "prompt_lookup"}, "sampling": {"temperature": 1.0}},
                    {"drafter": {"kind": "suffix"}, "sampling": {"temperature": 0.5}},
                ]
            },
            "different sampling settings",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(
    command, home: Path, changes: dict, message: str
) -> None:
    path = home / "bad.yaml"
    path.write_text(yaml.safe_dump(load_yaml(home / "plan.yaml") | changes))
    code, _, error = command("--config", path, "--prompts", home / "a.jsonl")
    assert code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", error)


def test_the_plans_that_come_along_are_read() -> None:
    from research.bandits.comparison import ArmsPlan

    for name in ("bandits.yaml", "lengths.yaml"):
        path = bandits.BANDITS.with_name(name)
        plan = parse(ArmsPlan, load_yaml(path), str(path))
        assert len(plan.arms) >= 4
    assert [arm.depth for arm in plan.arms] == [1, 2, 3, 4]
