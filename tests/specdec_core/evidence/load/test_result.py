"""Plans of load, and the speeds, times and ratios that follow from their records."""

import math

import pytest

from specdec_core.base.errors import UserError
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.result import (
    LoadResult,
    requests_frame,
    summary_frame,
)
from specdec_core.measure.comparison import over
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.load.measures import measured
from specdec_core.search.load.records import LoadRecord, records_frame
from specdec_core.search.load.workload import Load
from specdec_core.servers.table import SERVERS
from tests.load_result import REQUESTS, TOKENS, load_result, open_result
from tests.own_server import OwnServer

ONE, FOUR = (Load(clients=n, requests=REQUESTS) for n in (1, 4))


def test_speed_is_what_waiting_clients_are_written_together():
    result = load_result()
    ours, *_ = result.rows
    # Requests take 0.2 s with one client, 0.4 s with four, and the last of them 7 % more.
    mean = 1.035
    assert ours.tokens_per_second(ONE) == pytest.approx(TOKENS / (0.2 * mean))
    assert ours.tokens_per_second(FOUR) == pytest.approx(4 * TOKENS / (0.4 * mean))
    assert (
        ours.median(FOUR, lambda run: run.tokens_per_second) <= ours.tokens_per_second(FOUR) * 1.04
    )


def test_ratios_are_those_of_paired_requests():
    result = load_result()
    ours, chain, *_ = result.rows
    ratio = over(chain, ours, ONE)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.2 / 0.15,) * 3)
    assert over(ours, ours, ONE).value == 1
    table = summary_frame(result).set_index(["load", "contestant"])
    row = table.loc[("4", "chain")]
    assert row["over_autoregressive"] == pytest.approx(0.2 / 0.15)
    assert row["over_vllm"] == pytest.approx(0.13 / 0.15)  # its n-grams
    assert row["ttft_median"] == pytest.approx(0.2 * 1.035)
    assert row["tpot_p95"] > row["tpot_median"]
    assert (row["requests"], row["errors"], row["equal"], row["compared"]) == (16, 0, 16, 16)
    assert len(requests_frame(result)) == 4 * 2 * 2 * REQUESTS


def test_at_a_rate_latencies_begin_with_the_arrival_and_goodput_has_limits():
    late = LoadRecord(index=0, sent=2.5, arrival=2.0, first=3.0, last=4.0, tokens=5)
    (times,) = measured(records_frame([late])).to_dict("records")
    assert (times["ttft"], times["latency"], times["tpot"]) == (1.0, 2.0, 0.25)
    result = open_result()
    (load,) = result.loads
    ours, chain = result.rows
    # Ours takes 0.2 s for a request and its last one 7 % more, the chain 0.15 s: of 8 requests in
    # 3.7 s.
    table = summary_frame(result).set_index("contestant")
    assert table.loc["autoregressive", "good_share"] == 0
    assert table.loc["chain", "good_share"] == 1
    assert table.loc["chain", "goodput"] == table.loc["chain", "requests_per_second"]
    assert table.loc["chain", "goodput"] == pytest.approx(8 / (7 * 0.5 + 0.15 * 1.07))
    assert table.loc["chain", "tokens_per_second"] == table.loc["chain", "whole_run"]
    assert over(chain, ours, load).value == pytest.approx(0.2 / 0.15)
    assert result.best(load, "specdec") is chain
    assert result.lateness().max() == pytest.approx(0.01)
    chain.of(load)[0][3].last += 1
    shares = [chain.good_share(load, result.slo, some) for some in ([0, 3], [0, 1])]
    assert shares == [0.5, 1]


def test_what_drafted_is_counted_by_load():
    result = open_result()
    table = summary_frame(result).set_index("contestant")
    assert table.loc["chain", "candidates"] == 2.5
    assert math.isnan(table.loc["autoregressive", "candidates"])


def test_requests_that_failed_count_in_no_speed_and_their_row_is_not_the_best():
    result = load_result()
    _, chain, *_ = result.rows
    before = chain.tokens_per_second(ONE)
    assert result.best(ONE, "specdec") is chain
    chain.runs["1"][0][7].error = "status 500"
    assert chain.errors(ONE) == 1
    assert chain.tokens_per_second(ONE) > before  # the slowest is left out
    assert over(chain, result.rows[0], ONE).value == pytest.approx(0.2 / 0.15)
    assert result.best(ONE, "specdec") is result.rows[0]
    for run in chain.runs["1"]:
        for record in run:
            record.error = "ConnectError"
    assert math.isnan(chain.tokens_per_second(ONE))
    assert math.isnan(over(chain, result.rows[0], ONE).value)
    row = summary_frame(result).set_index(["load", "contestant"]).loc[("1", "chain")]
    assert math.isnan(row["ttft_median"])


def test_the_best_at_each_load_are_compared():
    result = load_result()
    leads = {lead.at.clients: lead for lead in result.leads()}
    assert set(leads) == {1, 4}
    assert (leads[1].ours, leads[1].theirs) == ("chain", "vLLM n-gram K=4")
    assert leads[1].requests == REQUESTS
    assert leads[1].ratio == pytest.approx(0.13 / 0.15)


def test_another_library_with_what_is_ours_is_not_its_own_best():
    result = load_result()
    theirs = result.best(ONE, "vllm")
    theirs.with_ours = True
    assert result.best(ONE, "vllm") not in (None, theirs)
    assert theirs.name not in {lead.theirs for lead in result.leads()}


def test_in_float32_other_texts_are_found():
    result = load_result("float32")
    assert result.unequal() == []
    result.rows[1].runs["4"][1][3].text = "other"
    assert [(load, row.name) for load, row in result.unequal()] == [(FOUR, "chain")]
    reduced = load_result()
    reduced.rows[1].runs["4"][1][3].text = "other"
    assert reduced.unequal() == []


def test_a_result_is_read_as_it_was_saved(tmp_path):
    result = load_result()
    result.save(tmp_path)
    assert LoadResult.load(tmp_path) == result
    with pytest.raises(UserError, match=r"no comparison under load in it"):
        LoadResult.load(tmp_path / "none")


def test_every_client_sends_as_many_requests():
    plan = LoadPlan(clients=(1, 4, 5, 16))
    assert [load.requests for load in plan.loads] == [24, 24, 25, 48]
    assert plan.needed == 16 + 48
    assert LoadPlan(clients=(4,), requests=10).loads == [Load(clients=4, requests=10)]


def test_requests_come_at_random_the_same_for_every_row(tiny_pair):
    plan = LoadPlan(clients=(2,), rates=(2, 4), arrivals=6, least=2, slots=3, max_new_tokens=4)
    assert [load.key for load in plan.loads] == ["2", "2/s", "4/s"]
    assert [plan.together(load) for load in plan.loads] == [3, 3, 3]
    assert plan.needed == 3 + 6
    workload = plan.workload([Prompt(str(n), f"x{n} = ") for n in range(9)], tiny_pair)
    closed, slow, fast = (plan.requests_of(load, workload) for load in plan.loads)
    assert [request.prompt for request in slow] == [request.prompt for request in workload[3:]]
    assert {request.arrival for request in closed} == {None}
    arrivals = [request.arrival for request in slow]
    assert arrivals == sorted(arrivals)
    assert [2 * request.arrival for request in fast] == pytest.approx(arrivals)
    other = plan.model_copy(update={"seed": 1}).requests_of(plan.loads[1], workload)
    assert [request.arrival for request in other] != arrivals


def test_too_few_prompts_are_refused_with_the_number_that_is_needed(tiny_pair):
    plan = LoadPlan(clients=(2,), requests=3, max_new_tokens=4)
    prompts = [Prompt(str(n), f"x{n} = ") for n in range(5)]
    requests = plan.workload(prompts, tiny_pair)
    assert [request.max_new_tokens for request in requests] == [4] * 5
    assert requests[1].prompt == tuple(tiny_pair.tokenizer("x1 = ")["input_ids"])
    with pytest.raises(UserError, match=r"4 prompts, but 2 clients need 5, 2 of them to warm up"):
        plan.workload(prompts[:4], tiny_pair)


def test_latencies_are_measured_of_greedy_decoding_alone():
    with pytest.raises(UserError, match="greedily"):
        LoadPlan(temperatures=(0.0, 1.0)).check()


def test_a_server_that_is_added_later_takes_part(monkeypatch):
    before = LoadPlan().peers
    monkeypatch.setitem(SERVERS, "own", OwnServer())
    assert set(LoadPlan().peers) == {*before, "own"}
