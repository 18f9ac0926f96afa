"""Servers of a comparison answer the same requests of every load in turns."""

from pathlib import Path

import numpy as np
import pytest

from cluster.load.comparison import ServerContestant, compare_servers, shown_slower
from cluster.load.cores import Cores
from cluster.load.servers import other_servers, our_servers
from jobs.choice import read_config
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec, RunnerSettings, parse
from specdec_core.engine import Engine
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.result import LoadRow
from specdec_core.measure.comparison import interleaved, over
from specdec_core.measure.parts import Parts
from specdec_core.models.location import located
from specdec_core.models.pair import load_pair
from specdec_core.prompts.prompt_sets import Prompt, load_prompts
from specdec_core.search.load.records import LoadRecord
from specdec_core.search.load.workload import Load
from specdec_core.servers.server import Mode
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm.process import VENV
from tests.configurations import CHAIN
from tests.load_result import records
from tests.local_server import LocalServer, ending_server, engine_server
from tests.observers import Heard
from tests.own_server import OwnServer

PAIR = (AUTOREGRESSIVE, CHAIN)
PLAN = LoadPlan(clients=(1, 2), requests=4, repeats=2, max_new_tokens=6)


class Turns:
    """Makes contestants and keeps, for each start of a server, who started with how many slots and
    the prompts that it was sent."""

    def __init__(self, pair, monkeypatch):
        self.pair = pair
        self.started: list[tuple[str, int]] = []
        self.sent: list[list[tuple[int, ...]]] = []
        add = Engine.add

        def adding(engine, request):
            self.sent[-1].append(request.tokens)
            add(engine, request)

        monkeypatch.setattr(Engine, "add", adding)

    def contestant(self, name, configuration):
        def server(slots):
            self.started.append((name, slots))
            self.sent.append([])
            return engine_server(self.pair, configuration, slots)

        row = LoadRow(name=name, group="specdec", autoregressive=name == "autoregressive")
        return ServerContestant(row, server)


class Broken(LocalServer):
    def start(self, port):
        raise UserError("no memory")

    def stop(self):
        pass


def broken(needed):
    row = LoadRow(name="other", group="vllm")
    return ServerContestant(row, lambda slots: Broken(lambda: None), needed)


def workload(pair, plan=PLAN):
    prompts = [Prompt(str(n), f"x{n} = {n} + ") for n in range(plan.needed)]
    return plan.workload(prompts, pair)


@pytest.fixture
def parts(tmp_path):
    with Parts.open(tmp_path, {"plan": 1}, LoadRecord) as parts:
        yield parts


def test_all_answer_the_same_requests_of_every_load_in_turns(tiny_pair, monkeypatch, parts):
    turns, observer = Turns(tiny_pair, monkeypatch), Heard()
    contestants = [
        turns.contestant("autoregressive", AUTOREGRESSIVE),
        turns.contestant("chain", CHAIN),
        broken(needed=False),
    ]
    cores = Cores.divide(1)
    rows = compare_servers(PLAN, contestants, workload(tiny_pair), cores, parts, observer)
    assert [row.name for row in rows] == ["autoregressive", "chain"]
    assert observer.warnings == ["without other: no memory"]
    assert observer.steps == 12  # all turns of three
    names = ["autoregressive", "chain"]
    first = [(name, 1) for name in interleaved([*names, "other"], 0) if name in names]
    later = [(name, n) for turn, n in ((1, 2), (1, 1), (2, 2)) for name in interleaved(names, turn)]
    assert turns.started == first + later
    for (_, slots), prompts in zip(turns.started, turns.sent, strict=True):
        assert len(prompts) == len(set(prompts)) == slots + 4
        assert set(prompts[slots:]) == set(turns.sent[0][1:])
    plain, chain = rows
    for load in PLAN.loads:
        assert [len(run) for run in chain.of(load)] == [4, 4]
        assert chain.errors(load) == 0
        assert chain.equal_texts(load, plain) == (8, 8)  # float32
        assert over(chain, plain, load).value > 0
    assert plain.candidates(PLAN.loads[0]) == 0 < chain.candidates(PLAN.loads[0])


def test_one_server_answers_all_loads_each_with_prompts_of_its_own(tiny_pair, monkeypatch, parts):
    turns, plan = Turns(tiny_pair, monkeypatch), PLAN.model_copy(update={"one_server": True})
    names, log = ("autoregressive", "chain"), Heard()
    contestants = [turns.contestant(name, c) for name, c in zip(names, PAIR, strict=True)]
    requests = workload(tiny_pair, plan)
    assert len(requests) == plan.needed == 2 + 4 + 4
    plain, chain = compare_servers(plan, contestants, requests, Cores(), parts, log)
    assert turns.started == [(name, 2) for n in range(2) for name in interleaved(names, n)]
    expected = sorted(tuple(request.prompt) for request in requests)
    assert all(sorted(prompts) == expected for prompts in turns.sent)
    # The other load is the first one in the second repeat.
    first, second = (turns.sent[turn][2:6] for turn in (0, -1))
    assert set(first) & set(second) == set()
    assert log.steps == 8
    for load in plan.loads:
        assert [len(run) for run in chain.of(load)] == [4, 4]
        assert chain.equal_texts(load, plain) == (8, 8)


def test_one_server_that_ends_under_a_load_is_started_again_for_the_next(
    tiny_pair, monkeypatch, parts, tmp_path
):
    plan = PLAN.model_copy(update={"one_server": True, "repeats": 1})
    turns, observer, started = Turns(tiny_pair, monkeypatch), Heard(), list[int]()

    def ending(slots):
        started.append(slots)
        if len(started) > 1:
            return engine_server(tiny_pair, AUTOREGRESSIVE, slots)
        return ending_server()

    other = ServerContestant(LoadRow(name="other", group="vllm"), ending, needed=False)
    plain = turns.contestant("autoregressive", AUTOREGRESSIVE)
    requests = workload(tiny_pair, plan)
    turns.sent.append([])
    plain, ended = compare_servers(plan, [plain, other], requests, Cores(), parts, observer)
    assert started == [2, 2]
    assert [ended.errors(load) for load in plan.loads] == [4, 0]
    assert observer.steps == 4


def test_an_interrupted_comparison_goes_on_with_what_is_missing(
    tiny_pair, monkeypatch, parts, tmp_path
):
    plan = PLAN.model_copy(update={"clients": (1,), "rates": (50.0,), "repeats": 1, "slots": 2})
    turns, cores = Turns(tiny_pair, monkeypatch), Cores()
    requests = workload(tiny_pair, plan)
    autoregressive = turns.contestant("autoregressive", AUTOREGRESSIVE)
    # In an order in which the broken one comes second.
    contestants = interleaved([autoregressive, broken(needed=True)], 0)
    with pytest.raises(UserError, match="no memory"):
        compare_servers(plan, contestants, requests, cores, parts)
    assert turns.started == [("autoregressive", 2)]
    first = autoregressive.row.runs["1"]

    turns.started.clear()
    again = turns.contestant("autoregressive", AUTOREGRESSIVE)
    observer = Heard()
    contestants = [again, turns.contestant("chain", CHAIN)]
    plain, chain = compare_servers(plan, contestants, requests, cores, parts, observer)
    second = interleaved(["autoregressive", "chain"], 1)
    assert turns.started == [("chain", 2), *((name, 2) for name in second)]
    assert (observer.done, observer.steps) == (1, 3)
    assert plain.runs["1"] == first
    # At a rate everybody is asked the same at the same times.
    load = next(each for each in plan.loads if each.rate)
    arrivals = [request.arrival for request in plan.requests_of(load, requests)]
    for row in (plain, chain):
        (run,) = row.of(load)
        assert [record.arrival for record in run] == arrivals
        assert all(record.sent >= record.arrival for record in run)
    assert chain.equal_texts(load, plain) == (4, 4)

    # Another configuration begins anew, and so does the same one where that is wanted.
    with Parts.open(tmp_path, {"plan": 2}, LoadRecord) as other:
        assert other.times == []
    assert len(parts.times) == 4


@pytest.mark.parametrize("needed", [False, True])
def test_a_server_that_ends_under_a_load_has_no_further_runs_under_it(
    needed, tiny_pair, monkeypatch, parts, tmp_path
):
    turns, log, observer = Turns(tiny_pair, monkeypatch), tmp_path / "other.log", Heard()
    started: list[int] = []

    def ending(slots):
        started.append(slots)
        if slots == 1:
            return engine_server(tiny_pair, AUTOREGRESSIVE, slots)
        return ending_server(log=log)

    row = LoadRow(name="other", group="vllm", autoregressive=True)
    other = ServerContestant(row, ending, needed)
    contestants = [turns.contestant("autoregressive", AUTOREGRESSIVE), other]
    requests = workload(tiny_pair)
    turns.sent.append([])
    plain, ended = compare_servers(PLAN, contestants, requests, Cores(), parts, observer)
    reason = f"other: its server ended: CudaError: no memory (log: {log})"
    assert observer.warnings == [f"without other: {reason}"]
    assert observer.steps == 8  # all turns of both
    assert started == [1, 2, 1]
    alone, together = PLAN.loads
    assert (plain.errors(alone), ended.errors(alone)) == (0, 0)
    assert (plain.errors(together), ended.errors(together)) == (0, 8)
    assert {r.error for run in ended.of(together) for r in run} == {reason}
    assert np.isnan(over(ended, plain, together).value)


def test_what_all_are_compared_with_must_not_end(tiny_pair, parts):
    row = LoadRow(name="other", group="vllm", autoregressive=True)
    plain = ServerContestant(row, lambda slots: ending_server())
    with pytest.raises(UserError, match="no memory"):
        compare_servers(PLAN, [plain], workload(tiny_pair), Cores(), parts, leave=True)


def test_what_is_shown_to_be_slower_at_a_load_has_no_further_runs_there(
    tiny_pair, monkeypatch, parts
):
    turns = Turns(tiny_pair, monkeypatch)
    plan = PLAN.model_copy(update={"clients": (1,), "repeats": 3})
    made = {"autoregressive": 0.2, "fast": 0.1, "slower": 0.2, "slow": 2.0, "failing": 0.05}
    contestants = [turns.contestant(name, AUTOREGRESSIVE) for name in made]
    for turn in range(3):
        for each in contestants:
            run = records(made[each.row.name], 0.1, 1)[:4]
            if each.row.name == "failing":
                run[0].error = "the answer broke off"
            parts.keep(f"1-{turn}-{each.row.key}", run)
    rows = compare_servers(plan, contestants, workload(tiny_pair), Cores(), parts, leave=True)
    [load] = plan.loads
    # One run shows what is not a disturbance.
    assert [len(row.of(load)) for row in rows] == [3, 3, 2, 1, 3]
    _, fast, _, slow, failing = rows
    assert over(slow, fast, load).high < 1  # over the turns that both had
    assert over(failing, fast, load).low > 1  # and yet it shows nothing of others


def test_of_many_servers_and_looks_chance_shows_none_to_be_slower():
    rng, load = np.random.default_rng(0), Load(clients=1, requests=24)
    slow, fast = rng.lognormal(0, 0.2, (2, 2, 24))  # seconds

    def row(name, seconds):
        runs = [
            [LoadRecord(index=n, sent=0, last=each, tokens=1) for n, each in enumerate(turn)]
            for turn in seconds.tolist()
        ]
        return LoadRow(name=name, group="vllm", runs={load.key: runs})

    others = [row(name, fast) for name in "bcdefgh"]
    # Just shown to be slower, where only two are compared, once.
    slow *= 1.001 / over(others[0], row("a", slow), load).low
    both = [row("a", slow), others[0]]
    assert shown_slower(both, load, looks=1) == {"a"}
    assert shown_slower(both, load, looks=10) == set()
    assert shown_slower([row("a", slow), *others], load, looks=1) == set()


CHAIN_MODE = {"kind": "draft_model", "policy": {"kind": "confidence_product", "threshold": 0.3}}
HYBRID = {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": CHAIN_MODE}
BY_LOAD = {
    "method": "draft_model",
    "num_speculative_tokens": 5,
    "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 3, 2], [4, 1024, 0]],
}


def test_ours_are_started_with_their_file_slots_and_cores(tiny_pair, tmp_path, monkeypatch):
    of_a_job = {"RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"}
    for name in of_a_job:
        monkeypatch.setenv(name, "another cluster's")
    plan = LoadPlan(pair=tiny_pair.spec, rows=({"drafter": {"kind": "suffix"}},))
    contestants = list(our_servers(plan, tiny_pair, ["serve"], Cores((3,), (4,)), tmp_path))
    assert [contestant.row.autoregressive for contestant in contestants] == [True, False]
    for contestant in contestants:
        server = contestant.server(7)
        command = server.command(8123)
        assert not of_a_job & server.environment.keys()
        assert command[0] == "serve"
        assert "--fresh" in command
        chosen, _ = read_config(Path(command[command.index("--config") + 1]))
        assert chosen.configuration == contestant.row.configuration
        assert chosen.pair == tiny_pair.spec
        for option, value in {"--slots": "7", "--port": "8123", "--cores": "3"}.items():
            assert command[command.index(option) + 1] == value


@pytest.mark.parametrize(("broken", "left"), [("own K=2", ["own"]), ("own", [])])
def test_a_mode_that_cannot_run_is_left_out_and_with_the_first_all_are(
    broken, left, tiny_pair, tmp_path, monkeypatch
):
    served, heard = OwnServer.served, Heard()

    def converted(server, pair, mode, *more):
        if mode.name == broken:
            raise UserError("its model cannot be converted")
        return served(server, pair, mode, *more)

    monkeypatch.setattr(OwnServer, "served", converted)
    given = OwnServer(), tiny_pair, Cores(), tmp_path
    assert [each.row.name for each in other_servers(*given, (), heard.warned)] == left
    assert heard.warnings == [f"without {broken}: its model cannot be converted"]
    with pytest.raises(UserError, match="cannot be converted"):
        list(other_servers(*given, (), None))


@pytest.mark.long
@pytest.mark.skipif(not VENV.exists(), reason="vLLM is not installed; `make bench-peers` does")
def test_vllm_writes_the_same_under_the_same_load(tmp_path):
    """On the bundled pair: vLLM has no attention for heads as narrow as the tiny pair's."""
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=512)
    pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}, runner=runner))
    plan = LoadPlan(
        pair=pair.spec, clients=(2,), requests=4, repeats=1, max_new_tokens=24, peers=("vllm",)
    )
    prompts = load_prompts(plan.prompts.source, plan.needed, pair.tokenizer)
    cores = Cores.divide(1)
    row = LoadRow(name="autoregressive", group="specdec", autoregressive=True)
    ours = ServerContestant(row, lambda slots: engine_server(pair, AUTOREGRESSIVE, slots))
    hybrid = parse(Configuration, {"drafter": HYBRID}, "test")
    vllm = SERVERS["vllm"]
    mine = [
        Mode("by load", BY_LOAD | {"model": located("bundled:draft-small")}, with_ours=True),
        vllm.plug_in_mode(hybrid, "plug-in"),
    ]
    plain, *own, export, plugged = other_servers(vllm, pair, cores, tmp_path, mine, None)
    draft = next(c for c in own if "draft model" in c.row.name)
    assert plugged.row.name == "plug-in"
    workload = plan.workload(prompts, pair)
    with Parts.open(tmp_path, {}, LoadRecord) as parts:
        servers = [ours, plain, draft, export, plugged]
        expected, *rows = compare_servers(plan, servers, workload, cores, parts)
    (load,) = plan.loads
    for found in rows:
        assert found.errors(load) == 0, found.runs
        assert found.equal_texts(load, expected) == (4, 4), found.name
