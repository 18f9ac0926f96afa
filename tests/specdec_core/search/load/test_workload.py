"""A workload says which requests come when, or one line says what is wrong with it."""

import json

import numpy as np
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import parse
from specdec_core.engine.scheduler import Limits
from specdec_core.prompts.prompt import Message
from specdec_core.search.load.trace import TraceRequest, read_trace
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import LiveSettings, Load, Slo, Workload, arrival_times
from specdec_core.search.plan import Plan

LOOKUP = {"drafter": {"kind": "prompt_lookup"}}


def write(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "a workload without requests: give clients, a rate or a trace"),
        ({"clients": []}, "clients: a workload without requests: no clients (got [])"),
        ({"clients": [0]}, "clients.0: Input should be greater than 0 (got 0)"),
        ({"rate": 0}, "rate: Input should be greater than 0 (got 0)"),
        ({"rate": float("inf")}, "rate: Input should be a finite number (got inf)"),
        ({"clients": 4, "rate": 6}, "clients and rate each say when requests come: give one"),
        ({"clients": 4, "arrivals": "poisson"}, "arrivals belong to a rate, not to clients"),
        ({"trace": "a", "requests": 5}, "a trace says itself how many requests there are"),
        ({"clients": [1, 8], "requests": 4}, "requests 4: fewer than the 8 clients"),
        ({"clients": 4, "user": 3}, "user: unknown key"),
        ({"rate": 6, "slo": {}}, "slo: an objective without a limit"),
        ({"rate": 6, "slo": {"ttft": -1}}, "slo.ttft: Input should be greater than 0 (got -1)"),
    ],
)
def test_a_wrong_workload_is_one_line(value, message):
    with pytest.raises(UserError) as raised:
        parse(Workload, value, "w.yaml")
    assert str(raised.value).startswith("w.yaml: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_arrivals_follow_seed_rate_and_kind():
    poisson = arrival_times(6, 20_000)
    assert poisson[-1] / len(poisson) == pytest.approx(1 / 6, rel=0.03)
    gaps = np.diff(poisson)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential
    assert (arrival_times(6, 20, seed=1) == arrival_times(6, 20, seed=1)).all()
    assert (arrival_times(6, 20, seed=1) != arrival_times(6, 20, seed=2)).any()
    assert arrival_times(4, 3, "constant").tolist() == [0, 0.25, 0.5]


def test_a_trace_is_read(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        {"arrival": 0, "prompt": "def", "max_new_tokens": 8},
        {"arrival": 0, "prompt_tokens": 80, "output_tokens": 4},
        {"arrival": 1.5, "prompt_tokens": 80},
    )
    first, second, third = read_trace(path)
    assert (first.prompt, second.prompt_tokens, third.arrival) == ("def", 80, 1.5)
    assert [each.most_tokens(16) for each in (first, second, third)] == [8, 4, 16]


def test_chats_of_a_trace_are_rendered_and_lengths_cut_or_repeat(tiny_pair, chat_pair):
    chat = (Message("user", "x = 1"),)
    trace = (
        TraceRequest(arrival=0, prompt="x = 1"),
        TraceRequest(arrival=1, messages=chat),
        TraceRequest(arrival=2, prompt_tokens=5),
    )
    traffic = Traffic(Workload(trace="t.jsonl"), ((7, 8, 9),), 16, Limits(1), trace)
    load = Load(requests=3)
    text, asked, cut = (r.tokens for r in traffic.requests(load, chat_pair.tokenizer))
    messages, options = [{"role": "user", "content": "x = 1"}], {"add_generation_prompt": True}
    template = chat_pair.tokenizer.apply_chat_template(messages, return_dict=False, **options)
    plain = [pair.tokenizer("x = 1")["input_ids"] for pair in (chat_pair, tiny_pair)]
    assert (list(text), list(asked), cut) == (plain[0], template, (7, 8, 9, 7, 8))
    # Without a template a single message is the prompt.
    assert list(traffic.requests(load, tiny_pair.tokenizer)[1].tokens) == plain[1]


def test_an_answer_whose_length_a_trace_tells_does_not_end_before(tiny_pair):
    told = TraceRequest(arrival=0, prompt_tokens=3, output_tokens=9)
    most = TraceRequest(arrival=0, prompt_tokens=3, max_new_tokens=9)
    traffic = Traffic(Workload(trace="t.jsonl"), ((7, 8, 9),), 16, Limits(1), (told, most))
    requests = traffic.requests(Load(requests=2), tiny_pair.tokenizer)
    assert [(r.max_new_tokens, r.ignore_eos) for r in requests] == [(9, True), (9, False)]


AT = {"arrival": 1, "prompt": "a"}
ANSWERED = {"arrival": 0, "messages": [{"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([AT | {"arrival": 2}, AT], ":2: arrival 1 s is before that of the request above (2 s)"),
        ([{"arrival": 0}], ":1: value: give a prompt, messages, or prompt_tokens"),
        ([ANSWERED], ":1: messages: the last is the assistant's, not the user's"),
        ([AT | {"tokens": 3}], ":1: tokens: unknown key"),
        ([{"prompt": "a"}], ":1: arrival: Field required"),
        ([], ": a workload without requests: the file is empty"),
    ],
)
def test_a_wrong_trace_is_one_line_that_names_the_place(records, message, tmp_path):
    path = write(tmp_path / "t.jsonl", *records)
    with pytest.raises(UserError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}{message}")


def test_an_objective_is_read_from_an_option():
    assert Slo.read("ttft=0.3,tpot=0.02", "--slo") == Slo(ttft=0.3, tpot=0.02)
    for text in ("ttft", "ttft=x", "speed=3", "ttft=-1"):
        with pytest.raises(UserError, match=f"^--slo {text}: "):
            Slo.read(text, "--slo")


def test_a_plans_trace_is_read_at_once_and_the_digest_follows_its_content(tmp_path):
    plan = {"search": [LOOKUP], "workload": {"trace": str(tmp_path / "none.jsonl")}}
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        Plan.model_validate(plan).resolve()
    path = write(tmp_path / "t.jsonl", {"arrival": 0, "prompt": "a"})
    plan = Plan.model_validate({"search": [LOOKUP], "workload": {"trace": str(path)}})
    before = plan.resolve().digest("p")
    write(path, {"arrival": 0, "prompt": "b"})
    assert plan.resolve().digest("p") != before


def test_a_live_run_has_a_request_for_each_client():
    sizes = [LiveSettings(requests=6).size(Load(clients=n, requests=9), 9) for n in (1, 8)]
    assert sizes == [6, 8]
