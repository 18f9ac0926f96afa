"""A sweep of a server ranks by a recording of these weights, races, and writes what starts the
champion. The server's modes run in this process."""

import os
from dataclasses import replace

import pandas as pd
import pytest

from cluster.load.comparison import ServerContestant
from cluster.sweep import server as server_sweep
from cluster.sweep import server_stages
from cluster.sweep.server import run_server_sweep
from dashboards.reports.server_sweep import report
from jobs import profile
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.policies.heuristic import HeuristicPolicy
from specdec_core.evidence.load.result import LoadRow
from specdec_core.search.plan import load_plan
from specdec_core.servers.plug_in_drafter import check_chains
from specdec_core.servers.server import Mode, ServedMode, WrittenFiles
from specdec_core.servers.step_profile import NGRAM
from specdec_core.servers.table import SERVERS
from tests.commands import plan_file, printed, server_plan
from tests.jobs.conftest import record_prompts
from tests.local_server import ending_server, engine_server
from tests.observers import Heard
from tests.own_server import OwnServer
from tests.specdec_core.cost.examples import fitted_profile
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.models.eagle.pair_heads import save_head_of


@pytest.fixture
def plan(tiny_pair, tmp_path):
    """A plan with a recording of the first half of its prompts, and with what steps cost."""
    folder = tmp_path / "recorded"
    found = load_plan(server_plan(tmp_path, tiny_pair.spec, 12, limit=6))
    costs = fitted_profile().model_copy(update={"proposals": {NGRAM: 0.0}})
    given = {"traces": str(folder), "profile": costs}
    found = found.model_copy(update=given)
    record_prompts(tiny_pair, tmp_path / "prompts.jsonl", folder, 8, limit=6)
    return found


@pytest.fixture
def in_process(tiny_pair, monkeypatch):
    """The server's modes run in this process. Returns the names of modes that end at their first
    request, none yet."""
    ends: set[str] = set()

    def local(server, pair, mode, cores, scratch, needed=False, *_):
        drafter = dict(mode.settings) or None
        configuration = Configuration.model_validate({"drafter": drafter})
        row = LoadRow(
            name=mode.name,
            group=server.name,
            with_ours=mode.with_ours,
            autoregressive=mode.autoregressive,
            version="own 1",
        )
        if mode.name in ends:
            return ServerContestant(row, lambda slots: ending_server(mode.name), needed)
        return ServerContestant(
            row, lambda slots: engine_server(tiny_pair, configuration, slots), needed
        )

    monkeypatch.setattr(server_stages, "mode_server", local)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return ends


@pytest.mark.usefixtures("in_process")
def test_a_sweep_of_these_weights_is_ranked_raced_and_written_once(plan, tmp_path, monkeypatch):
    home, own, asked = tmp_path / "home", OwnServer.modes, []
    monkeypatch.setattr(OwnServer, "modes", lambda *args, **kw: asked.append(1) or own(*args, **kw))

    def sweep(fresh=False):
        given = (plan, OwnServer(), home, "specdec sweep", "mine", fresh)
        return run_server_sweep(*given)[0]

    result, folder = sweep(), home / "sweeps" / "mine"
    assert result.ranked == 2
    assert len(asked) == 1  # it warns of what is not installed
    assert [row.name for row in result.race.rows][:2] == ["own", "own K=2"]
    assert len(result.left_out) == 1
    assert result.others_raced
    assert result.race.with_other_texts() == set()
    [load] = result.race.loads
    assert all(row.errors(load) == 0 for row in result.race.rows)
    assert (folder / "champion" / "usage.txt").read_text() == "own-server drafter.yaml\n"
    configuration = folder / "started" / "config.yaml"
    assert configuration.exists()
    assert result.command.startswith("env PYTHONPATH=")
    assert f"tests.own_server {configuration} 2 8000" in result.command

    # Not marked as finished, it goes on with its result: nothing is started.
    monkeypatch.setattr(server_stages, "compare_servers", None)
    assert sweep().champion == result.champion

    changed = {"target": "0" * 16, "draft": "1" * 16}
    monkeypatch.setattr(server_sweep, "weights_here", lambda *_: changed)
    with pytest.raises(UserError, match="was begun with other weights of target"):
        sweep()
    with pytest.raises(UserError, match="recorded from other weights of target"):
        sweep(fresh=True)
    assert [each.name for each in (home / "sweeps").iterdir()] == ["mine"]


@pytest.mark.usefixtures("in_process")
def test_a_draft_that_the_server_cannot_read_is_left_out_of_the_whole_sweep(
    plan, tmp_path, monkeypatch
):
    started, own, profiled = server_stages.mode_server, OwnServer.profile, []

    def readable(server, pair, mode, *more):
        if mode.draft is not None:
            raise UserError("no such architecture")
        return started(server, pair, mode, *more)

    def profile(server, pair, **sizes):
        profiled.append([*pair.spec.drafts])
        return own(server, pair, **sizes)

    monkeypatch.setattr(server_stages, "mode_server", readable)
    monkeypatch.setattr(OwnServer, "profile", profile)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    search = (*plan.configurations, configured({"kind": "prompt_lookup"}))
    given = plan.model_copy(update={"configurations": search, "profile": None})
    heard = Heard()
    result, folder, _ = run_server_sweep(given, OwnServer(), tmp_path, "", "mine", False, heard)
    assert profiled == [[]]
    said = "without some settings of our server: draft draft: no such architecture"
    assert said in heard.warnings
    assert folder.profile().drafts == {}
    assert len(result.race.rows) == 2
    assert not any(each.drafts for each in result.configurations.values())


@pytest.mark.usefixtures("in_process")
def test_the_sweep_finds_the_profile_that_the_command_has_measured(
    plan, command, tmp_path, monkeypatch
):
    """In the type that the target is stored in, not in the one that is the fastest here."""

    def fastest(name, width, pack):
        return "bfloat16" if width > 1 else "float32"

    monkeypatch.setattr("specdec_core.models.pair._faster_dtype", fastest)
    monkeypatch.setitem(SERVERS, "own", OwnServer())
    pair = plan.pair.with_runner(target_dtype="auto", draft_dtype="auto")
    search = [{"drafter": {"kind": "draft_model"}}]
    file = plan_file(tmp_path, pair=pair.model_dump(mode="json"), search=search)
    home, options = tmp_path / "home", ["--config", file, "--engine", "own", "--batches", "1,2"]
    printed(command(profile.main, home, *options))
    monkeypatch.setattr(OwnServer, "profile", None)
    given = plan.model_copy(update={"pair": pair, "profile": None})
    result, *_ = run_server_sweep(given, OwnServer(), home, "", "mine")
    assert result.times == "cpu, own 1"


@pytest.mark.usefixtures("in_process")
def test_first_runs_correct_the_ranking_and_are_no_runs_of_the_race(plan, tmp_path):
    live = plan.live.model_copy(update={"repeats": 2})
    twice = plan.model_copy(update={"live": live})
    result, folder, _ = run_server_sweep(twice, OwnServer(), tmp_path, "", "mine")
    names = [row.name for row in result.race.rows]
    assert result.first is not None
    assert len(names) == len(set(names)) >= len(result.first.rows)
    for race in (result.first, result.race):
        [load] = race.loads
        assert [len(row.of(load)) for row in race.rows] == [1] * len(race.rows)
    table = pd.read_csv(folder.path / "simulated.csv")
    assert (table["tokens_per_second"] != table["simulated_tokens_per_second"]).all()
    expected = {value for by_load in result.expected.values() for value in by_load.values()}
    assert expected <= set(table["tokens_per_second"])
    shown = report(result)
    assert {"race", "first"} <= {part.key for part in shown.parts}
    raced = shown.frames["requests"]
    assert set(raced["race"]) == {"first runs", "race"}


@pytest.mark.usefixtures("in_process")
def test_a_table_by_load_is_raced_with_the_other_modes(plan, tmp_path, monkeypatch):
    lookup = {"kind": "prompt_lookup", "max_tokens": 2}
    joint = Mode("own by load", lookup, configuration=configured(lookup), with_ours=True)
    monkeypatch.setattr(server_stages, "by_load", lambda *_: joint)
    monkeypatch.setattr(server_stages, "best_of_all", lambda rows, _: rows[-1])
    live = plan.live.model_copy(update={"repeats": 2})
    plan = plan.model_copy(update={"live": live})
    result, *_ = run_server_sweep(plan, OwnServer(), tmp_path, "", "mine")
    assert {"own", "own K=2", "own by load"} <= {row.name for row in result.race.rows}
    assert result.champion == "own by load"
    assert "over own K=2, the server's best default" in report(result).findings[1]


@pytest.mark.usefixtures("in_process")
def test_the_servers_own_mode_corrects_the_configuration_that_has_its_settings(plan, tmp_path):
    live = plan.live.model_copy(update={"repeats": 2})
    [draft] = plan.pair.drafts
    chains = configured(chain(max_tokens=2) | {"draft": draft})
    same = [each for each in plan.configurations if each.id == chains.id]
    assert len(same) == 1
    twice = plan.model_copy(update={"live": live, "configurations": tuple(same)})
    result, *_ = run_server_sweep(twice, OwnServer(), tmp_path, "", "mine")
    [load] = result.first.loads
    speeds = {row.name: row.tokens_per_second(load) for row in result.first.rows}
    assert set(speeds) == {"own", "own K=2"}
    expected = {name: by_load[load.key] for name, by_load in result.expected.items()}
    assert expected == pytest.approx(speeds)


class PlugInServer(OwnServer):
    """It drafts all chains, with a plug-in that measures no costs."""

    stages = OwnServer.stages | {"plug_in"}

    def check_plug_in(self, configuration, drafts):
        check_chains(configuration, self.title)

    def plug_in_settings(self, configuration):
        return configuration.drafter.model_dump(mode="json")

    def plugged_in(self, configuration, models, runner):
        return WrittenFiles({"drafter.yaml": configuration.to_yaml()}, "own-server drafter.yaml")


@pytest.mark.usefixtures("in_process")
def test_a_plug_in_gets_the_costs_that_a_policy_asks_for_from_the_profile(plan, tmp_path):
    asking = configured(chain("break_even", target_cost="profile"))
    both = plan.live.model_copy(update={"finalists": 2})
    given = plan.model_copy(update={"configurations": (asking,), "live": both})
    result, *_ = run_server_sweep(given, PlugInServer(), tmp_path, "", "mine")
    assert (result.ranked, result.left_out) == (2, [])  # it, and the server's own chain
    [name] = [row.name for row in result.race.rows if row.name.endswith(", by plug-in")]
    assert not result.configurations[name].unpriced
    [load] = result.race.loads
    assert result.expected[name][load.key] > 0


@pytest.mark.usefixtures("in_process")
def test_a_policy_that_reads_hidden_states_without_a_head_is_ranked(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(HeuristicPolicy, "needs_hidden", True)
    reading = configured(chain("heuristic"))
    given = plan.model_copy(update={"configurations": (reading,)})
    result, *_ = run_server_sweep(given, PlugInServer(), tmp_path, "", "mine")
    assert (result.ranked, result.left_out) == (2, [])  # it, and the server's own chain


def test_a_server_is_not_swept_by_other_texts_than_its_own_greedy_ones(plan):
    asked = plan.model_copy(update={"sampling": Sampling(repetition_penalty=1.1)})
    with pytest.raises(UserError, match="is compared greedily, without penalties"):
        server_sweep.race_plan(asked, OwnServer())


def test_a_server_answers_all_loads_if_the_source_has_prompts_for_all(plan, tiny_pair):
    """With 12 prompts, of which 6 are recorded: loads of one and of two clients."""

    def raced(requests):
        workload = plan.workload.model_validate({"clients": [1, 2]})
        live = plan.live.model_copy(update={"requests": requests})
        asked = plan.model_copy(update={"workload": workload, "live": live})
        race = server_sweep.race_plan(asked, OwnServer())
        observer = Heard()
        found = server_sweep._raced(asked, race, 6, tiny_pair.tokenizer, observer)
        race, prompts, others = found
        assert len(prompts) == race.needed
        assert len(observer.warnings) == (not race.one_server)
        return race.one_server, race.slots, others

    assert raced(2) == (True, 2, True)  # 2 to warm up, and 2 for each load
    assert raced(4) == (False, 2, True)  # for each load 2 and 4
    assert raced(5) == (True, 2, False)  # of all 12


def test_a_race_has_at_least_one_request_of_each_client(plan):
    workload = plan.workload.model_validate({"clients": [1, 6]})
    live = plan.live.model_copy(update={"requests": 4})
    asked = plan.model_copy(update={"workload": workload, "live": live})
    race = server_sweep.race_plan(asked, OwnServer())
    assert [load.requests for load in race.loads] == [6, 6]


def test_a_mode_that_ends_in_the_race_has_a_row_that_says_so(plan, tmp_path, in_process):
    in_process.add("own K=2")
    result, *_ = run_server_sweep(plan, OwnServer(), tmp_path, "", "mine")
    [load] = result.race.loads
    errors = {row.name: row.errors(load) for row in result.race.rows}
    assert errors.pop("own K=2") == load.requests
    assert set(errors.values()) == {0}
    assert result.champion in errors
    ended = next(row for row in result.race.rows if row.name == "own K=2")
    assert all("CudaError: no memory" in str(r.error) for run in ended.of(load) for r in run)


def test_the_shown_command_has_the_variables_that_the_race_had(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_THREADS", "99")
    variables = {n: v for n, v in os.environ.items() if n != "LLAMA_ARG_THREADS"}
    served = ServedMode("1", {}, lambda *given: ["serve", *map(str, given)], variables)
    assert served.shown(4, 8000) == "env -u LLAMA_ARG_THREADS serve 4 8000"
    changed = replace(served, environment={**os.environ, "NEW": "1 2"})
    assert changed.shown(4, 8000) == "env 'NEW=1 2' serve 4 8000"
    assert replace(served, environment=os.environ).shown(4, 8000) == "serve 4 8000"


def test_what_a_targets_conversion_says_is_not_said_of_the_drafts(plan, tmp_path, monkeypatch):
    def unreadable(*_):
        raise UserError("the target cannot be converted")

    monkeypatch.setattr(server_stages, "mode_server", unreadable)
    heard = Heard()
    with pytest.raises(UserError, match="the target cannot be converted"):
        run_server_sweep(plan, OwnServer(), tmp_path, "", "mine", False, heard)
    assert not heard.warnings


@pytest.mark.usefixtures("in_process")
def test_settings_that_a_profile_does_not_rank_are_not_raced_without_a_word(plan, tmp_path):
    other = plan.profile.model_copy(update={"drafts": {}})
    unranked = plan.model_copy(update={"profile": other})
    with pytest.raises(UserError, match="no settings can be ranked on it"):
        run_server_sweep(unranked, OwnServer(), tmp_path, "", "mine")


@pytest.mark.usefixtures("in_process")
def test_a_kept_profile_without_a_draft_is_measured_again(plan, tmp_path, monkeypatch):
    """It may have been made when the draft could not be started."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    own, measured = OwnServer.profile, []

    def profile(server, pair, **sizes):
        measured.append(pair)
        found = own(server, pair, **sizes)
        return found if len(measured) > 1 else found.model_copy(update={"drafts": {}})

    monkeypatch.setattr(OwnServer, "profile", profile)
    given = plan.model_copy(update={"profile": None})
    with pytest.raises(UserError, match="no settings can be ranked on it"):
        run_server_sweep(given, OwnServer(), tmp_path, "", "mine")
    result, *_ = run_server_sweep(given, OwnServer(), tmp_path, "", "another")
    assert len(measured) == 2
    assert result.ranked == 2


def test_what_cannot_be_swept_is_refused_before_anything_starts(plan, tiny_pair, tmp_path):
    home = tmp_path / "home"
    engines = plan.model_copy(update={"profile": fitted_profile()})
    with pytest.raises(UserError, match="profile: of this engine, but a server's steps cost other"):
        run_server_sweep(engines, OwnServer(), home, "")
    workload = plan.workload.model_validate({"clients": [2], "slo": {"ttft": 1}})
    with pytest.raises(UserError, match="compared by their tokens a second"):
        run_server_sweep(plan.model_copy(update={"workload": workload}), OwnServer(), home, "")
    policy = {"kind": "specdecpp", "head": str(tmp_path / "none")}
    missing = configured({"kind": "draft_model", "policy": policy})
    samples = plan.model_copy(update={"configurations": (missing,), "samples": (missing,)})
    with pytest.raises(UserError, match="none"):
        run_server_sweep(samples, OwnServer(), home, "")
    save_head_of(tiny_pair, tmp_path / "head", feature_layers=(0, 1))
    headed = plan.pair.model_copy(update={"drafts": {"head": str(tmp_path / "head")}})
    unrecorded = plan.model_copy(update={"pair": headed, "traces": None})
    with pytest.raises(UserError, match="gives no hidden states, which EAGLE heads read"):
        run_server_sweep(unrecorded, OwnServer(), home, "")
    assert not home.exists()
