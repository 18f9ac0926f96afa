"""A sweep of a server ranks by a recording of these weights, races, and writes what starts the
champion. The server's modes run in this process."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.load_comparison import Contestant
from cluster.sweep import server as server_sweep
from cluster.sweep.server import run_server_sweep
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.cost import ForwardCost, Measurement, Profile
from specdec_core.engine import Request
from specdec_core.evidence.load.result import LoadRow
from specdec_core.evidence.server_choice import ServerSweep
from specdec_core.models.pair import Pair
from specdec_core.recordings.find import finish
from specdec_core.search.plan import ResolvedPlan, load_plan
from specdec_core.servers.server import Mode
from tests.commands import prompts_file
from tests.local_server import engine_server
from tests.own_server import OwnServer
from tests.specdec_core.recordings.recorded import recorded


@pytest.fixture
def plan(tiny_pair: Pair, tmp_path: Path) -> ResolvedPlan:
    """A plan with a recording of the first half of its prompts."""
    prompts = prompts_file(tmp_path, [f"x{n} = {n} +" for n in range(12)])
    content = {
        "pair": tiny_pair.spec.model_dump(mode="json"),
        "prompts": {"source": str(prompts), "limit": 6},
        "max_new_tokens": 8,
        "workload": {"clients": [2], "requests": 4},
        "search": [
            {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": [2, 3]}}},
            {"drafter": {"kind": "tree", "branching": [2, 1]}},
        ],
        "live": {"finalists": 1, "repeats": 1, "requests": 4, "within": 0.9},
        "traces": str(tmp_path / "recorded"),
    }
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    found = load_plan(path)
    chosen = found.prompts.load(tiny_pair.tokenizer)
    requests = [
        Request(each.id, tuple(tiny_pair.tokenizer(f"x{n} = {n} +")["input_ids"]), 8, seed=n)
        for n, each in enumerate(chosen)
    ]
    described = found.prompts.described(chosen)
    folder = tmp_path / "recorded"
    recorded(tiny_pair, requests, folder, prompts=described, mixing=0)
    finish(folder)
    return found


@pytest.fixture
def times(tmp_path: Path) -> Path:
    """What steps cost: 10 ms, and 1 ms for a draft's."""

    def cost(seconds: float) -> ForwardCost:
        return ForwardCost.fit(
            [
                Measurement(width=width, context=16, batch=batch, seconds=seconds + width * 1e-5)
                for width in (1, 2, 4)
                for batch in (1, 2)
            ]
        )

    of_types = {"target_dtype": "float32", "draft_dtype": "float32"}
    profile = Profile(
        target=cost(0.01), drafts={"draft": cost(0.001)}, device="made up", **of_types
    )
    path = tmp_path / "times.json"
    profile.save(path)
    return path


@pytest.fixture
def in_process(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def local(server: OwnServer, pair: Pair, mode: Mode, *_: Any) -> Contestant:
        drafter = dict(mode.settings) or None
        configuration = Configuration.model_validate({"drafter": drafter})
        row = LoadRow(
            name=mode.name,
            group=server.name,
            with_ours=mode.with_ours,
            autoregressive=mode.autoregressive,
            version="own 1",
        )
        return Contestant(row, lambda slots: engine_server(tiny_pair, configuration, slots))

    monkeypatch.setattr(server_sweep, "mode_server", local)
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.usefixtures("in_process")
def test_a_sweep_of_these_weights_is_ranked_raced_and_written_once(
    plan, times, tmp_path, monkeypatch
):
    home = tmp_path / "home"

    def sweep(fresh: bool = False) -> ServerSweep:
        given = (plan, OwnServer(), home, "specdec sweep", "mine", fresh, times)
        return run_server_sweep(*given)[0]

    result, folder = sweep(), home / "sweeps" / "mine"
    assert result.ranked == 2
    assert [row.name for row in result.race.rows][:2] == ["own", "own K=2"]
    assert len(result.left_out) == 1
    assert result.others_raced
    assert result.race.with_other_texts() == []
    [load] = result.race.loads
    assert all(row.errors(load) == 0 for row in result.race.rows)
    assert (folder / "champion" / "usage.txt").read_text() == "own-server drafter.yaml\n"
    configuration = folder / "started" / "config.yaml"
    assert configuration.exists()
    assert result.command.startswith("env PYTHONPATH=")
    assert f"tests.own_server {configuration} 2 8000" in result.command

    # Not marked as finished, it goes on with its result: nothing is started.
    monkeypatch.setattr(server_sweep, "compare_servers", None)
    assert sweep().champion == result.champion

    changed = {"target": "0" * 16, "draft": "1" * 16}
    monkeypatch.setattr(server_sweep, "weights_here", lambda *_: changed)
    with pytest.raises(UserError, match="was begun with other weights of target"):
        sweep()
    with pytest.raises(UserError, match="recorded from other weights of target"):
        sweep(fresh=True)
    assert [each.name for each in (home / "sweeps").iterdir()] == ["mine"]


def test_what_cannot_be_swept_is_refused_before_anything_starts(plan, tmp_path):
    home = tmp_path / "home"
    with pytest.raises(UserError, match="missing"):
        run_server_sweep(plan, OwnServer(), home, "", times=tmp_path / "missing.json")
    workload = plan.workload.model_validate({"clients": [2], "slo": {"ttft": 1}})
    with pytest.raises(UserError, match="compared by their tokens a second"):
        run_server_sweep(plan.model_copy(update={"workload": workload}), OwnServer(), home, "")
    assert not home.exists()
