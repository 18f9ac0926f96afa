"""Servers are compared in turns, each started anew for each load, with no prompt sent twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.load_comparison import Contestant, compare_servers
from cluster.serving.server_process import Cores, Server
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.studies.load.plan import LoadPlan
from specdec_core.studies.load.result import LoadRow, over
from tests.local_server import LocalServer, engine_server

CHAIN = Configuration(drafter=DraftModelSettings())
PLAN = LoadPlan(clients=(1, 2), requests=4, repeats=2, max_new_tokens=6)


class Turns:
    """Makes contestants and keeps, for each start of a server, who started with how many slots and
    the prompts that it was sent."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair = pair
        self.started: list[tuple[str, int]] = []
        self.sent: list[list[tuple[int, ...]]] = []
        add = Engine.add

        def adding(engine: Engine, request: object) -> None:
            self.sent[-1].append(request.tokens)
            add(engine, request)

        monkeypatch.setattr(Engine, "add", adding)

    def contestant(self, name: str, configuration: Configuration) -> Contestant:
        def server(slots: int) -> Server:
            self.started.append((name, slots))
            self.sent.append([])
            return engine_server(self.pair, configuration, slots)

        row = LoadRow(name=name, group="specdec", autoregressive=name == "autoregressive")
        return Contestant(row, server)


class Watched(Observer):
    def __init__(self) -> None:
        self.steps, self.warnings = 0, []

    def step(self) -> None:
        self.steps += 1

    def warned(self, message: str) -> None:
        self.warnings.append(message)


class Broken(LocalServer):
    def start(self, port: int) -> str:
        raise UserError("no memory")

    def stop(self) -> None:
        pass


def broken(needed: bool) -> Contestant:
    server: Callable[[int], Server] = lambda slots: Broken(lambda: None)  # noqa: E731
    return Contestant(LoadRow(name="other", group="vllm"), server, needed)


def workload(pair: Pair) -> list:
    prompts = [Prompt(str(n), f"x{n} = {n} + ") for n in range(PLAN.needed)]
    return PLAN.workload(prompts, pair)


def test_all_answer_the_same_requests_of_every_load_in_turns(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, observer = Turns(tiny_pair, monkeypatch), Watched()
    contestants = [
        turns.contestant("autoregressive", AUTOREGRESSIVE),
        turns.contestant("chain", CHAIN),
        broken(needed=False),
    ]
    rows = compare_servers(PLAN, contestants, workload(tiny_pair), Cores.divide(1), observer)
    assert [row.name for row in rows] == ["autoregressive", "chain"]
    assert observer.warnings == ["without other: no memory"]
    # Another one begins each time.
    one, other = "autoregressive", "chain"
    assert turns.started == [
        *((one, 1), (other, 1), (other, 2), (one, 2), (one, 1), (other, 1), (other, 2), (one, 2))
    ]
    for (_, slots), prompts in zip(turns.started, turns.sent, strict=True):
        assert len(prompts) == len(set(prompts)) == slots + 4
        assert set(prompts[slots:]) == set(turns.sent[0][1:])
    plain, chain = rows
    for clients in PLAN.clients:
        assert [len(run) for run in chain.runs[clients]] == [4, 4]
        assert chain.errors(clients) == 0
        assert chain.equal_texts(clients, plain) == (8, 8)  # float32
        assert over(chain, plain, clients).value > 0


def test_a_server_that_is_needed_must_start(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tiny_pair, monkeypatch)
    contestants = [broken(needed=True), turns.contestant("autoregressive", AUTOREGRESSIVE)]
    with pytest.raises(UserError, match="no memory"):
        compare_servers(PLAN, contestants, workload(tiny_pair), Cores())
