"""What an answer says of its rounds, and clients that leave midway."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.serving.engine_process import EngineProcess
from cluster.serving.replica import FleetReplica
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.engine import Chunk, Engine
from specdec_core.engine.scheduler import Limits
from specdec_core.servers.process import running
from tests.cluster.serving.http.events import client_of, events_of
from tests.configurations import BEGUN, CHAIN
from tests.local_server import server_of, service_of

ROUNDS = {"include_rounds": True}
OPTIONS: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 40}


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_rounds_have_the_texts_tokens_and_their_candidates(client, drawn):
    options = {**OPTIONS, "prompt": "def main(", **drawn}
    *parts, last = client.completions.create(**options, stream_options=ROUNDS)
    parts.append(last)
    assert all(part.choices[0].logprobs is None for part in parts)  # which were not asked for
    rounds = [part.round for part in parts]
    tokens = [token for told in rounds for token in told["tokens"]]
    assert "".join(t["text"] for t in tokens) == "".join(p.choices[0].text for p in parts)
    counts = last.specdec
    assert len(rounds) == counts["rounds"]
    for key in ("drafted", "accepted"):
        assert sum(told[key] for told in rounds) == counts[key] > 0
    assert all(len(told["candidates"]) == told["drafted"] for told in rounds)
    assert all(0 < t["probability"] <= 1 for t in tokens)
    # Greedy drafts need no distributions.
    known = [t["drafted"] is not None for t in tokens if t["origin"] == "draft"]
    assert all(known) if drawn["temperature"] else not any(known)
    assert all(told["milliseconds"] > 0 for told in rounds)


@pytest.mark.parametrize(("chat", "end"), [(False, "stop_token_ids"), (True, "min_tokens")])
def test_the_rounds_texts_are_the_choices_wherever_it_ends(client, chat, end):
    create: Any = client.chat.completions.create if chat else client.completions.create
    asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "def main("}
    asked = {**OPTIONS, **asked, "stream_options": ROUNDS}

    def told(**more):
        parts = [p for p in create(**asked, extra_body={"return_token_ids": True, **more})]
        said = [p.choices[0].delta.content if chat else p.choices[0].text for p in parts]
        rounds = [part.round for part in parts if hasattr(part, "round")]
        tokens = [token["text"] for each in rounds for token in each["tokens"]]
        ids = [token for part in parts for token in part.choices[0].token_ids]
        return "".join(text or "" for text in said), ids, "".join(tokens)

    text, ids, of_rounds = told(ignore_eos=True)
    assert of_rounds == text
    if end == "stop_token_ids":
        late = next(token for token in ids if ids.index(token) > 3)
        more = {"ignore_eos": True, "stop_token_ids": [late]}
    else:
        more = {"ignore_eos": True, "stop": text[3:5], "min_tokens": 12}
    text, ids, of_rounds = told(**more)
    assert len(ids) > 1
    assert of_rounds == text


def test_other_streams_have_none(client):
    parts = client.completions.create(**OPTIONS, prompt="def main(")
    assert not any(hasattr(part, "round") for part in parts)


async def test_what_goes_on_elsewhere_says_who_drafted_there(chat_pair):
    """The other engine's bandit has more arms, all of them different. The output is long enough not
    to end before it moves."""
    pair = replace(chat_pair, spec=chat_pair.spec.with_runner(max_length=512))
    bandits = BanditSettings(arms=[1, 4]), BanditSettings(arms=[2, 3, 5, {"kind": "prompt_lookup"}])
    first, second = (service_of(Engine(pair, Configuration(drafter=bandit))) for bandit in bandits)
    body = {"prompt": "def main(", "max_tokens": 480, "ignore_eos": True, "stream": True}

    async with client_of(first) as http:
        asked = http.post("/v1/completions", json={**body, "stream_options": ROUNDS})
        answering = asyncio.create_task(asked)
        while first.metrics._generated < 20:
            await asyncio.sleep(0.001)
        other = FleetReplica("other", second.fleet.replicas[0].served)
        other.served.loop.open()
        first.fleet.replicas.append(other)
        first.fleet.observe(first.metrics)
        first.fleet.replicas[0].served.loop._fail("killed")
        *_, last = events = events_of(await answering)
    told = Counter(event["round"]["arm"] for event in events)
    assert last["specdec"]["arms"] == told
    assert last["specdec"]["rounds"] == told.total()
    for bandit in bandits:
        assert set(told) & {arm.label for arm in bandit.arms}
    assert {arm.label for arm in bandits[1].arms} <= set(told)


BODY = {"max_tokens": 8, "ignore_eos": True, "n": 2, "return_token_ids": True}


async def answered(pair, path, body, configuration=BEGUN):
    """The whole answer, and the events of one that is streamed."""
    async with client_of(service_of(Engine(pair, configuration, 2))) as http:
        streamed = await http.post(path, json={**BODY, **body, "stream": True})
        whole = {k: v for k, v in body.items() if k != "stream_options"}
        return (await http.post(path, json={**BODY, **whole})).json(), events_of(streamed)


def parts_of(events, index):
    return [part for event in events for part in event["choices"] if part["index"] == index]


async def test_a_completion_repeats_its_prompt_once(chat_pair):
    body = {"prompt": "def main(", "echo": True, "logprobs": 1}
    whole, events = await answered(chat_pair, "/v1/completions", body)
    for choice in whole["choices"]:
        parts = parts_of(events, choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "text_offset"):
            told = [value for part in parts for value in part["logprobs"][name]]
            assert told == choice["logprobs"][name]
        assert [part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")] == [
            choice["prompt_token_ids"]
        ]


@pytest.mark.parametrize("traced", [False, True])
async def test_a_chats_choice_has_one_role(chat_pair, traced):
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    body = {**asked, "stream_options": {"include_rounds": traced}}
    whole, events = await answered(chat_pair, "/v1/chat/completions", body)
    for choice in whole["choices"]:
        deltas = [part["delta"] for part in parts_of(events, choice["index"])]
        assert [n for n, delta in enumerate(deltas) if delta.get("role")] == [0]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == choice["message"]["content"]
    if traced:
        rounds = [event for event in events if "round" in event]
        assert len(rounds) == events[-1]["specdec"]["rounds"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def main(", "echo": True, "logprobs": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_lower_choices_open_first(chat_pair, monkeypatch, path, body):
    step, held = Engine.step, list[Chunk]()

    def late(self):
        """Delays the chunks of every first of two steps behind the chunks of the second."""
        chunks = step(self)
        if not held and not self.idle:
            held.extend(chunks)
            return []
        ids = {chunk.request_id for chunk in held}
        others = [chunk for chunk in chunks if chunk.request_id not in ids]
        chunks = [*others, *held, *(chunk for chunk in chunks if chunk.request_id in ids)]
        held.clear()
        return chunks

    monkeypatch.setattr(Engine, "step", late)
    whole, events = await answered(chat_pair, path, {**body, "n": 4}, Configuration())
    came = [part["index"] for event in events for part in event["choices"]]
    assert list(dict.fromkeys(came)) == [0, 1, 2, 3]
    for choice in whole["choices"]:
        tokens = [t for part in parts_of(events, choice["index"]) for t in part["token_ids"]]
        assert tokens == choice["token_ids"]


HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
WORDS = ("def", "class", "import", "return", "if", "x", "y", "1", "(", ")", ":")


async def asked(url, requests, clients=32):
    """Send random requests from clients of which a third leaves midway. Returns the number of
    requests that were answered, and of those that were given up."""
    random, counts = Random(0), {"answered": 0, "left": 0}
    limits = httpx.Limits(max_connections=None)

    async def ask():
        most = random.randint(1, 8) if random.random() < 1 / 3 else None
        body = {
            "prompt": " ".join(random.choices(WORDS, k=random.randint(1, 40))),
            "max_tokens": random.randint(8, 48),
            "temperature": random.choice([0, 1]),
            "n": random.choice([1, 1, 1, 2]),
            "ignore_eos": True,
            "stream": True,
        }
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            events = 0
            async for line in answer.aiter_lines():
                assert not line.startswith('data: {"error"')
                if line == "data: [DONE]":
                    return "answered"
                events += line.startswith("data:")
                if events == most:
                    return "left"
        raise AssertionError("the answer broke off")

    async def client():
        for _ in waiting:
            counts[await ask()] += 1

    waiting = iter(range(requests))
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(client() for _ in range(clients)))
    return counts["answered"], counts["left"]


def lost(url, engine=None, seconds=30):
    """Whether requests or parts of the cache are still held after this time, by the metrics, or in
    the engine itself, which tells its status with its steps."""
    end = time.monotonic() + seconds
    while True:
        page = httpx.get(f"{url}/metrics", trust_env=False).text
        samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
        held = [sample.value for sample in samples if sample.name in HELD]
        assert len(held) == len(HELD)
        if engine is not None:
            status = engine.status()
            held += [status.waiting, status.cache_usage, not engine.idle]
        if not any(held) or time.monotonic() > end:
            return any(held)
        time.sleep(0.1)


def test_clients_that_leave_take_nothing_with_them(chat_pair):
    engine = Engine(chat_pair, CHAIN, 4)
    with running(server_of(service_of(engine))) as url:
        answered, left = asyncio.run(asked(url, 48))
        assert answered + left == 48
        assert 6 <= left <= 28
        assert not lost(url, engine)


def test_what_they_took_would_be_found(tiny_pair):
    """The bug: a request whose client has left keeps some of the cache."""

    class Kept(Engine):
        lost = 0

        def cancel(self, request_id):
            super().cancel(request_id)
            self.lost += 1

        def status(self):
            status = super().status()
            return replace(status, cache_usage=status.cache_usage + 0.01 * self.lost)

    engine = Kept(tiny_pair, AUTOREGRESSIVE, 2)
    with running(server_of(service_of(engine))) as url:
        assert asyncio.run(asked(url, 24))[1]
        assert lost(url, engine, 0.5)


@pytest.mark.long
def test_a_thousand_requests_lose_nothing(tiny_spec):
    """With the engine in a process of its own, as `specdec serve` has it."""
    with running(server_of(service_of(EngineProcess(tiny_spec, CHAIN, Limits(8))))) as url:
        assert sum(asyncio.run(asked(url, 1000))) == 1000
        assert not lost(url)
