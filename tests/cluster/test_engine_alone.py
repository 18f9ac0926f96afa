"""An engine without its server answers what the server answers."""

from __future__ import annotations

import pytest

from cluster import engine_alone
from cluster.engine_alone import EngineAlone
from cluster.load_comparison import Contestant
from cluster.serving.server_process import Cores
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.evidence.load.load import BenchLoad
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.result import LoadRow
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import Prompt
from tests.local_server import engine_server

CHAIN = Configuration(drafter=DraftModelSettings())
ROW = LoadRow(name="chain", group="specdec", configuration=CHAIN)
PLAN = LoadPlan(clients=(2,), requests=4, repeats=1, max_new_tokens=6)


def workload(pair: Pair, plan: LoadPlan) -> list:
    prompts = [Prompt(str(n), f"x{n} = {n} + ") for n in range(plan.needed)]
    return plan.workload(prompts, pair)


def test_it_writes_what_its_server_writes(tiny_pair: Pair) -> None:
    (load,), requests = PLAN.loads, workload(tiny_pair, PLAN)
    server = Contestant(ROW, lambda slots: engine_server(tiny_pair, CHAIN, slots))
    alone = EngineAlone.of(ROW, tiny_pair.spec)
    assert (alone.row.name, alone.row.over_http) == ("chain, engine alone", False)
    expected = server.measure(PLAN, requests, load, Cores())
    found = alone.measure(PLAN, requests, load, Cores())
    for record, other in zip(found, expected, strict=True):
        assert (record.index, record.text) == (other.index, other.text)
        assert (record.prompt_tokens, record.tokens) == (other.prompt_tokens, 6)
        assert (record.rounds, record.drafted) == (other.rounds, other.drafted)
        assert 0 <= record.sent < record.first < record.last
    missing = tiny_pair.spec.model_copy(update={"target": "/no/such/model"})
    with pytest.raises(UserError, match="/no/such/model"):
        EngineAlone.of(ROW, missing).measure(PLAN, requests, load, Cores())


def test_requests_at_a_rate_come_when_they_should(tiny_pair: Pair) -> None:
    plan = PLAN.model_copy(update={"clients": (), "rates": (20.0,), "slots": 2})
    load, requests = BenchLoad(rate=20.0), workload(tiny_pair, plan)
    found = engine_alone._answer(tiny_pair.spec, CHAIN, plan, requests, load, ())
    arrivals = [request.arrival for request in plan.requests_of(load, requests)]
    assert [record.arrival for record in found] == arrivals
    assert all(record.first > record.begun == record.arrival for record in found)
