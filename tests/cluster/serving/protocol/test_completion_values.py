"""Which sampling settings a request may ask for, and what an answer tells."""

import json
from collections import Counter

import pytest
from pydantic import ValidationError

from cluster.serving.http.answer import event
from cluster.serving.http.routes.chat import ChatRequest
from cluster.serving.http.routes.completions import CompletionChoice, CompletionRequest
from cluster.serving.protocol.counts import NO_DRAFTER, SpecDec
from cluster.serving.protocol.errors import ApiError, parse_body
from specdec_core.config import Sampling
from specdec_core.engine import Engine, Request
from tests.configurations import drafting
from tests.specdec_core.kinds import chain, configured


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1e39", "-1e-40"])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_numbers_that_are_no_setting_are_refused_by_name(name, number):
    with pytest.raises(ApiError, match=f"{name}: ") as refused:
        parse_body(CompletionRequest, f'{{"prompt": "x", "{name}": {number}}}'.encode())
    assert refused.value.status == 400
    assert refused.value.body.error.param == name


MANY = 20_000
UNKNOWN = {f"key{n}": n for n in range(MANY)}
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("kind", "body", "key"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages"),
        (ChatRequest, {"messages": [{**HI, **UNKNOWN}]}, "messages"),
        (ChatRequest, {"messages": [HI], **UNKNOWN}, "key0"),
        (ChatRequest, {"messages": [HI], "stream_options": UNKNOWN}, "stream_options"),
        (ChatRequest, {"messages": [HI], "logit_bias": UNKNOWN}, "logit_bias"),
        (ChatRequest, {"messages": [HI], "metadata": UNKNOWN}, "metadata"),
        (ChatRequest, {"messages": [HI], "stop": [0] * MANY}, "stop"),
        (ChatRequest, {"messages": [HI], "stop_token_ids": ["a"] * MANY}, "stop_token_ids"),
        (CompletionRequest, {"prompt": [[{}] * MANY] * 2}, "prompt"),
    ],
)
def test_a_body_with_many_errors_is_refused_for_the_first_ones(kind, body, key):
    content = json.dumps(body)
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(content)
    assert found.value.error_count() < 5
    with pytest.raises(ApiError) as refused:
        parse_body(kind, content.encode())
    assert refused.value.body.error.param == key
    assert len(refused.value.body.error.message) < 300


def test_an_event_is_one_line_however_lines_are_split():
    text = "".join(map(chr, range(0x2100)))
    (line,) = event(CompletionChoice(index=0, text=text)).splitlines()[:-1]
    assert json.loads(line.removeprefix("data: "))["text"] == text


def test_a_temperature_too_small_to_divide_by_is_greedy():
    asked = parse_body(CompletionRequest, b'{"prompt": "x", "temperature": 1e-40}')
    assert asked.sampling(Sampling(temperature=0.7), 512).greedy


def test_an_answer_says_who_drafted_where_that_follows_the_load(tiny_pair):
    alone = configured(chain(max_tokens=3) | {"draft": "draft"})
    schedule = drafting("schedule", ranges={1: alone.drafter, 2: None})
    engine = Engine(tiny_pair, schedule, slots=2)
    requests = [Request(str(n), (5, 6, 7 + n), 4 + 8 * n, ignore_eos=True) for n in range(2)]
    generations = engine.generate(requests)
    rounds = Counter(r.arm for generation in generations for r in generation.rounds)
    told = SpecDec.of(generations, schedule, [(schedule, rounds)])
    assert set(told.arms) == {NO_DRAFTER, alone.drafter.label}
    assert sum(told.arms.values()) == told.rounds
    assert SpecDec.of(generations, alone, [(alone, Counter({None: 3}))]).arms == {}
