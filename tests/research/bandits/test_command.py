"""`specdec lab bandits` compares bandits with their arms, live or by replay; bad input fails."""

import json
import re

import pandas as pd
import pytest
import yaml

from research.bandits import __main__ as bandits
from research.bandits.comparison import ArmsPlan
from specdec_core.config import load_yaml, parse
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.recordings.find import FINISHED
from specdec_core.recordings.record import record_requests
from tests.commands import assert_shown, far_profile, prompts_file
from tests.dashboards.conftest import REQUESTS
from tests.registered import runs_in

ARMS = [1, 4, {"kind": "prompt_lookup"}]


@pytest.fixture
def home(home, tiny_spec):
    """A workspace with a plan, prompts and another machine's profile."""
    plan = {
        "pair": tiny_spec.model_dump(mode="json"),
        "arms": ARMS,
        "bandits": [{}, {"rule": "exp3"}, {"reward": "time"}],
    }
    (home / "plan.yaml").write_text(yaml.safe_dump(plan))
    far_profile(home, 0.1, 0.01)
    for name in ("a", "b"):
        prompts_file(home, (f"{name} {i} = {i}" for i in range(3)), name)
    return home


@pytest.fixture
def compared(command, home):
    """Run the command, by the plan of the workspace unless another one is given."""

    def call(*arguments):
        given = [] if "--config" in arguments else ["--config", home / "plan.yaml"]
        return command(bandits.main, home, *arguments, *given)

    return call


def test_prompts_of_several_sets_are_decoded_in_turn(compared, home):
    done = compared(
        *("--prompts", home / "a.jsonl", "--prompts", home / "b.jsonl", "--limit", 2),
        *("--max-new-tokens", 16, "--repeats", 1, "--slots", 2, "--name", "mine"),
    )
    assert_shown(done, "UCB of", "EXP3 of", "over the", "the best single arm", "4 prompts")
    folder = home / "bandits" / "mine"
    table = pd.read_csv(folder / "table.csv").set_index("name")
    assert list(table["kind"]) == ["baseline", *["arm"] * 3, *["bandit"] * 3]
    text = (folder / "bandits.md").read_text()
    assert len(re.findall(r"\n\| (?:\*\*)?UCB of", text)) == 6  # two rules, in three tables
    assert "<svg" in (folder / "bandits.html").read_text()

    client, [logged], _ = runs_in(home)
    assert logged.info.status == "FINISHED"
    assert logged.data.tags["counted"] == "live"
    assert logged.data.metrics["UCB_of_3_arms.mat"] == pytest.approx(
        table.loc["UCB of 3 arms", "mat"]
    )
    files = {file.path for file in client.list_artifacts(logged.info.run_id)}
    assert {"bandits.html", "table.csv", "regret.svg"} <= files

    # what was learned is a state to start from
    states = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for drafter in (BanditSettings(arms=ARMS), BanditSettings(arms=ARMS, rule="exp3")):
        [stem] = (
            stem
            for stem, state in states.items()
            if (state["rule"], state["reward"]) == (drafter.rule, "tokens")
        )
        named = drafter.model_copy(update={"state": f"mine/{stem}"})
        assert sum(build_bandit(named).rounds) > 0


def test_a_recording_is_replayed_with_another_machines_times(compared, home, tiny_pair):
    folder = home / "traces" / "known"
    record_requests(tiny_pair, REQUESTS, folder)
    (folder / FINISHED).touch()
    done = compared("--traces", folder, "--profile", home / "far.yaml")
    assert_shown(done, "replayed, 4 prompts", "far away")
    table = pd.read_csv(home / "bandits" / "plan-known" / "table.csv").set_index("name")
    assert table.loc["autoregressive", "tokens_per_second"] == pytest.approx(10)
    k4 = table.loc["draft, K=4"]
    assert k4["tokens_per_second"] < k4["mat"] / 0.1
    # by --traces alone nothing is decoded, and the recording is also found by its name
    again = compared("--traces", "known", "--profile", home / "far.yaml")
    assert_shown(again)
    first, second = (
        [line for line in each.stdout.splitlines() if "UCB of" in line] for each in (done, again)
    )
    assert first == second


def test_the_plans_that_come_along_are_read():
    for name in ("bandits.yaml", "lengths.yaml"):
        path = bandits.BANDITS.with_name(name)
        plan = parse(ArmsPlan, load_yaml(path), str(path))
        assert len(plan.arms) >= 4
    assert [arm.depth for arm in plan.arms] == [1, 2, 3, 4]
