"""`/metrics` counts what the answers say, under vLLM's names."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.serving.metrics import Metrics
from specdec_core.base.errors import UserError
from specdec_core.engine import Chunk, Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import load_pair
from specdec_core.tokens.statistics import Generation, Round
from specdec_core.tokens.token_tree import TokenOrigin
from tests.cluster.serving.http.events import client_of
from tests.configurations import BANDIT, BEGUN, FOUR
from tests.local_server import fleet_of, service_of
from tests.specdec_core.engine.test_broken_logits import NAN, poison

PROMPTS = ["def main(", "import", "class A:"]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(page):
    """The values by name and labels; of all, the model's name is left out."""
    return {
        (s.name, frozenset(s.labels.items()) - {("model_name", "tiny")}): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }


class Server:
    """The application in this process."""

    def __init__(self, http):
        self.http = http

    async def complete(self, prompt, **body):
        answer = await self.http.post("/v1/completions", json={"prompt": prompt, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def metrics(self):
        # What Prometheus says it takes; names keep their colons all the same.
        accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"}
        answer = await self.http.get("/metrics", headers=accept)
        assert answer.headers["content-type"].startswith("text/plain; version=")
        return samples(answer.text)


def value(found, name, **labels):
    return found[name, frozenset(labels.items())]


@asynccontextmanager
async def serving(engine):
    async with client_of(service_of(engine, queue=2)) as http:
        yield Server(http)


@pytest.fixture
def engine(tiny_pair):
    return Engine(tiny_pair, FOUR, slots=2)


async def test_counts_are_those_of_the_answers(engine):
    async with serving(engine) as server:
        asked = [server.complete(p, max_tokens=20, ignore_eos=True) for p in PROMPTS]
        answers = await asyncio.gather(*asked)
        found = await server.metrics()
        for key, name in {
            "drafted": "vllm:spec_decode_num_draft_tokens_total",
            "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        }.items():
            assert value(found, name) == sum(a["specdec"][key] for a in answers) > 0
        rounds = sum(a["specdec"]["rounds"] for a in answers)
        assert value(found, "specdec:rounds_total", arm=FOUR.label) == rounds
        # A request's first round has no candidates.
        assert value(found, "specdec:round_candidates_bucket", le="0.0") >= len(PROMPTS)
        drafts = rounds - value(found, "specdec:round_candidates_bucket", le="0.0")
        assert value(found, "vllm:spec_decode_num_drafts_total") == drafts
        for key, name in {
            "prompt_tokens": "vllm:prompt_tokens_total",
            "completion_tokens": "vllm:generation_tokens_total",
        }.items():
            assert value(found, name) == sum(a["usage"][key] for a in answers)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        places = [value(found, name, position=str(place)) for place in range(4)]
        assert places == sorted(places, reverse=True)
        assert sum(places) == value(found, "vllm:spec_decode_num_accepted_tokens_total")
        origins = [v for (name, _), v in found.items() if name == "specdec:tokens_total"]
        assert sum(origins) == value(found, "vllm:generation_tokens_total") == 60
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert value(found, f"vllm:{name}_seconds_count") == len(PROMPTS)
        assert value(found, "vllm:request_success_total", finished_reason="length") == 3
        parts = [value(found, "specdec:step_seconds_total", part=p) for p in ("draft", "target")]
        assert min(parts) > 0
        other = value(found, "specdec:step_seconds_total", part="other")
        oracle = value(found, "specdec:oracle_seconds_total")
        assert parts[1] + other <= oracle < sum(parts) + other  # not all candidates were accepted
        labels = {"configuration": FOUR.id, "label": FOUR.label, "lossless": "true"}
        assert value(found, "specdec:configuration_info", certified="false", **labels) == 1


async def test_the_time_of_reading_prompts_is_counted(tiny_pair):
    engine = Engine(tiny_pair, FOUR, limits=Limits(2, step_tokens=16))

    async with serving(engine) as server:
        found = await server.metrics()
        assert value(found, "specdec:step_seconds_total", part="read") == 0
        await server.complete("x = 1\n" * 20, max_tokens=1)
        found = await server.metrics()
        assert value(found, "specdec:step_seconds_total", part="read") > 0
        # The one round was without a draft.
        parts = [value(found, "specdec:step_seconds_total", part=p) for p in ("target", "other")]
        assert sum(parts) <= value(found, "specdec:oracle_seconds_total")


def test_an_oracle_drafts_up_to_the_last_accepted_candidate(engine):
    def chunk(drafted, accepted):
        step = Round(0, drafted, accepted, accepted + 1, 4, 8.0, 2.0, 1.0, depth=drafted)
        return Chunk(str(drafted), "", [1], [TokenOrigin.BONUS], step)

    metrics = Metrics("tiny", fleet_of(engine))
    for name in (0, 2, 4):
        metrics.submitted(Request(str(name), (1,), 9))
    for chunks, seconds in (
        ([chunk(4, 1), chunk(2, 2)], 8.0 * 2 / 4 + 3.0),
        ([chunk(4, 0)], 3.0),
        ([chunk(0, 0)], 3.0),
        ([chunk(4, 4)], 11.0),
    ):
        before = metrics._oracle
        metrics.stepped(FOUR, chunks)
        assert metrics._oracle - before == pytest.approx(seconds)


def test_time_between_rounds_and_of_a_token_are_counted_as_vllm_does(engine, monkeypatch):
    step = Round(0, 4, 1, 2, 4, 8.0, 2.0, 1.0, depth=4)
    now = 0.0
    monkeypatch.setattr("cluster.serving.metrics.perf_counter", lambda: now)
    metrics = Metrics("tiny", fleet_of(engine))

    def counted(name):
        found = samples(metrics.page().decode())
        return value(found, f"vllm:{name}_seconds_count"), value(found, f"vllm:{name}_seconds_sum")

    metrics.submitted(Request("whole", (1,), 9))
    done = Generation("whole", 1, [1] * 6, "", [], [step], "length", seconds=0.25)
    for now, tokens, finished in ((1.0, 1, None), (1.5, 3, None), (2.0, 2, done)):  # noqa: B007
        chunk = Chunk("whole", "", [1] * tokens, [TokenOrigin.BONUS] * tokens, step, finished)
        metrics.stepped(FOUR, [chunk])
    assert counted("inter_token_latency") == (2, 0.5 + 0.5)
    assert counted("request_time_per_output_token") == (1, 1.0 / 5)
    # Another engine resumed it, and had it for `seconds`: it has not waited after its first token.
    assert counted("request_queue_time") == (1, 1.0)


def test_the_first_tokens_time_is_not_that_of_a_round_before_it(tiny_pair):
    """Where the target begins the trees, a text's first round adds nothing to it."""
    configuration = BEGUN
    engine = Engine(tiny_pair, configuration)
    metrics = Metrics("tiny", fleet_of(engine))
    request = Request("r", (5, 6, 7), 8, ignore_eos=True)
    metrics.submitted(request)
    engine.add(request)
    for counted in (0, 1):
        metrics.stepped(configuration, engine.step())
        found = samples(metrics.page().decode())
        assert value(found, "vllm:time_to_first_token_seconds_count") == counted
        assert value(found, "vllm:prompt_tokens_total") == 3 * counted
        assert value(found, "vllm:inter_token_latency_seconds_count") == 0


async def test_running_waiting_refused_and_abandoned_requests_are_counted(engine):
    async with serving(engine) as server:

        async def ask():
            body = {"prompt": "def main(", "max_tokens": 200, "ignore_eos": True}
            return (await server.http.post("/v1/completions", json=body)).status_code

        asked = [asyncio.create_task(ask()) for _ in range(5)]
        done, left = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [429]
        found = await server.metrics()
        assert value(found, "specdec:requests_refused_total") == 1
        assert value(found, "vllm:num_requests_running") == 2
        assert value(found, "vllm:num_requests_waiting") == 2
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        found = await server.metrics()
        assert value(found, "vllm:num_requests_running") == 0
        assert value(found, "vllm:request_success_total", finished_reason="abort") == 4


async def test_what_the_engine_refuses_is_not_counted_as_abandoned(engine):
    # The good one is still at work when the bad one is refused.
    good, bad = Request("good", (5, 6), 200), Request("bad", (5, 6), 10_000)

    service = service_of(engine)
    async with service.fleet:
        with pytest.raises(UserError, match="context"):
            await service.fleet.submit([good, bad])
        found = samples(service.metrics.page().decode())
        for reason in ("abort", "error", "stop", "length"):
            assert value(found, "vllm:request_success_total", finished_reason=reason) == 0


async def test_a_bandits_rounds_are_counted_by_arm(tiny_pair):
    configuration = BANDIT

    async with serving(Engine(tiny_pair, configuration)) as server:
        answer = await server.complete("def main(", max_tokens=40, ignore_eos=True)
        found = await server.metrics()
        arms = {
            dict(labels)["arm"]: count
            for (name, labels), count in found.items()
            if name == "specdec:rounds_total"
        }
        assert arms == answer["specdec"]["arms"]


async def test_a_request_whose_logits_are_no_numbers_is_told_and_counted(tiny_spec):
    """The engine goes on with the others, and is not started again."""
    pair = load_pair(tiny_spec)
    poison(pair.target)

    async with serving(Engine(pair, FOUR, slots=3)) as server:
        healthy = server.complete(PROMPTS[0], max_tokens=20, ignore_eos=True)
        body = {"prompt": [5, NAN, 7], "max_tokens": 9}
        broken = server.http.post("/v1/completions", json=body)
        streamed = server.http.post("/v1/completions", json={**body, "stream": True})
        answer, whole, events = await asyncio.gather(healthy, broken, streamed)
        assert answer["usage"]["completion_tokens"] == 20
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "no_numbers"
        assert "after 3 tokens of this sequence" in whole.json()["error"]["message"]
        assert "after 3 tokens of this sequence" in events.text
        found = await server.metrics()
        assert value(found, "vllm:request_success_total", finished_reason="error") == 2
        assert value(found, "vllm:request_success_total", finished_reason="length") == 1
        assert value(found, "specdec:engine_restarts_total") == 0
