"""A plan asks every client for as many requests, and for enough prompts that none is used twice."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.load.workload import Load


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
