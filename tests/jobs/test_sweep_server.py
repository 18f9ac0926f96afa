"""`specdec sweep --engine` ranks a server's settings, races them in it, registers the champion."""

import pytest

from cluster.sweep import server, server_stages
from dashboards.store import connect
from dashboards.tracking.registry import find_champion
from jobs import sweep
from specdec_core.evidence.server_choice import ServerSweep
from specdec_core.search.folder import SweepFolder
from specdec_core.servers.table import SERVERS
from tests.commands import assert_shown, printed, server_plan
from tests.dashboards.reports.test_server_sweep import sweep as made_up
from tests.own_server import OwnServer
from tests.registered import runs_in


@pytest.mark.long
@pytest.mark.usefixtures("ray_running")  # a server's answers are recorded by Ray
def test_a_server_is_swept_from_its_answers_to_its_champion(
    tiny_spec, command, tmp_path, monkeypatch
):
    monkeypatch.setitem(SERVERS, "own", OwnServer())
    plan = server_plan(tmp_path, tiny_spec, 6)
    home, arguments = tmp_path / "home", ["--config", plan, "--engine", "own", "--name", "mine"]
    done = command(sweep.main, home, *arguments)
    assert_shown(done, "1 configurations have no settings in our server: ", "tests.own_server")
    assert_shown(done, "The race at each load", "expected", "champion ")
    folder = home / "sweeps" / "mine"
    result = ServerSweep.load(folder)
    assert (folder / "recording" / "finished").exists()
    names = [row.name for row in result.race.rows]
    assert names[:2] == ["own", "own K=2"]
    assert result.ranked == 2
    (load,) = result.race.loads
    plain = result.race.autoregressive()
    for row in result.race.rows:
        assert row.errors(load) == 0
        assert row.equal_texts(load, plain) == (4, 4)
    assert result.expected[result.champion][load.key] > 0
    speeds = {row.name: row.tokens_per_second(load) for row in result.race.rows}
    assert speeds[result.champion] == max(speeds.values())
    assert (folder / "champion" / "usage.txt").read_text() == "own-server drafter.yaml\n"
    assert "Start the champion" in (folder / "report.md").read_text()
    champion = find_champion(server="own")
    assert champion.configuration == result.configuration
    assert find_champion() is None  # of this engine
    model = f"{result.race.pair.name}-own"
    version = connect().get_model_version_by_alias(model, "champion")
    assert version.tags["server"] == "own"
    assert version.tags["server_version"] == "own 1"
    assert version.tags["hardware"]

    # Unfinished, it goes on with its result: nothing is started.
    (folder / "finished").unlink()
    monkeypatch.setattr(server_stages, "compare_servers", None)
    printed(command(sweep.main, home, *arguments))


def test_what_another_process_has_logged_meanwhile_is_not_logged_again(home, command, monkeypatch):
    result, folder = made_up(), SweepFolder(home / "sweeps" / "mine")
    result.configurations = {}  # so that nothing is registered
    (folder.path / server_stages.LOGS).mkdir(parents=True)
    result.save(folder.path)
    # Each process has read the result before the first one logs it.
    monkeypatch.setattr(server, "run_server_sweep", lambda *_: (result.model_copy(), folder, []))
    for _ in range(2):
        printed(command(sweep.main, home, "--engine", "vllm"))
    _, [run], _ = runs_in(home)
    assert ServerSweep.load(folder.path).mlflow_run_id == run.info.run_id
