"""A deployment serves what one engine writes, with one replica or several."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
from ray import serve

from cluster.serving import deployment
from cluster.serving.control import find_server
from cluster.serving.start import Start
from specdec_core.base.errors import UserError
from specdec_core.config import Placement, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.servers.process import free_port
from tests.commands import children, wait_until
from tests.configurations import BANDIT, FOUR, drafting
from tests.specdec_core.kinds import chain, configured

MODEL = "tiny"
PROMPT = "def main("
OTHER = {"kind": "tree", "draft": "other"}

http = httpx.Client(timeout=120)  # no test is about speed


@pytest.fixture(scope="module")
def url(ray_running, tiny_spec):
    start = Start(deployment.deployment_of(tiny_spec, FOUR), MODEL, Limits(2))
    with deployment.serving(start, port=free_port()) as url:
        yield url
    serve.shutdown()  # the next server has a port of its own


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_completion_is_the_engines_text_with_usage_and_counts(url, client, tiny_pair):
    health = http.get(f"{url}/health").json()
    assert health["ready"]
    assert (health["model"], health["configuration"]) == (MODEL, FOUR.id)
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40}
    answer = client.completions.create(**asked)
    choice = answer.choices[0]
    engine = Engine(tiny_pair)  # autoregressive: the served configuration is lossless
    assert choice.text == engine.generate([Request("", engine.encode(PROMPT), 40)])[0].text
    parts = list(client.completions.create(**asked, stream=True))
    assert len(parts) > 2
    assert "".join(part.choices[0].text for part in parts) == choice.text
    assert choice.finish_reason in ("length", "stop")
    tokens = answer.usage.completion_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    counts = answer.specdec
    assert counts["configuration"] == answer.system_fingerprint == FOUR.id
    assert counts["lossless"] is True
    assert 0 < counts["accepted"] <= counts["drafted"]
    assert counts["rounds"] / tokens == pytest.approx(counts["verification_rate"])
    assert tokens / counts["rounds"] == pytest.approx(counts["mat"])


def test_nothing_is_between_a_client_and_the_replica_on_one_node(url):
    assert not serve.status().proxies
    answer = http.get(f"{url}/health")
    assert answer.is_success
    assert "server" not in answer.headers


def called(port):
    """How a call of a replica's method by gRPC ends, without Ray's token."""
    method = "/ray.serve.ASGIService/HandleRequest"
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as end:
        channel.unary_unary(method)(b"", timeout=10)
    code: grpc.StatusCode = end.value.code()
    return code


def test_ray_serves_own_port_asks_for_rays_token(url):
    (server,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if "ServeReplica:specdec:completions" in " ".join(process.info["cmdline"] or ())
    )
    listening = {c.laddr.port for c in server.net_connections("tcp") if c.status == "LISTEN"}
    codes = {called(port) for port in listening - {int(url.rpartition(":")[2])}}
    assert grpc.StatusCode.UNAUTHENTICATED in codes
    assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}


def test_a_client_that_leaves_frees_its_slots(url):
    body = {"prompt": [PROMPT] * 32, "max_tokens": 200, "ignore_eos": True}

    def health():
        return http.get(f"{url}/health").json()

    with http.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()  # httpx leaves when it is collected
        next(lines)
        before = health()
        assert before["running"] > 0
    wait_until(lambda: not health()["running"])
    assert (cancelled := health()["cancelled"]) > before["cancelled"]
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{url}/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: not health()["running"])
    assert health()["cancelled"] > cancelled


def test_nothing_is_started_for_a_pair_that_cannot_serve(tiny_spec):
    beside = drafting("pearl")
    with pytest.raises(UserError, match="--cluster"):
        deployment.check_servable(tiny_spec, beside)
    deployment.check_servable(tiny_spec, beside, Placement())
    deployment.check_servable(tiny_spec, BANDIT)
    for other in (drafting("draft_model", draft="other"), drafting("bandit", arms=[1, OTHER])):
        with pytest.raises(UserError, match="draft 'other'"):
            deployment.check_servable(tiny_spec, other)
    missing = tiny_spec.model_copy(update={"target": "/no/such/folder"})
    with pytest.raises(UserError, match="/no/such/folder"):
        deployment.check_servable(missing, FOUR)


COUPLED = Sampling(temperature=0.9, coupling="gumbel")
CHAIN = configured(chain(max_tokens=4), COUPLED)
LOOKUP = configured({"kind": "prompt_lookup"}, COUPLED)
PATH = "/v1/completions"
LONG = {"max_tokens": 200, "ignore_eos": True}
# Greedy and coupled requests, with everything that depends on the tokens before.
BODIES: list[dict[str, Any]] = [
    {"prompt": "def main(", "temperature": 0, **LONG},
    {"prompt": "class A:", "seed": 1, **LONG},
    {"prompt": "import os", "temperature": 0, "logprobs": 2, **LONG},
    {"prompt": "x = 1", "seed": 2, "n": 2, **LONG},
    {"prompt": "def f(x):", "temperature": 0, "frequency_penalty": 0.7, **LONG},
    {"prompt": "for i in", "seed": 3, "repetition_penalty": 1.3, **LONG},
    {"prompt": "a", "seed": 4, "max_tokens": 200, "min_tokens": 180, "stop": ["e"]},
    {
        "prompt": "b",
        "seed": 5,
        "max_tokens": 200,
        "response_format": {"type": "regex", "regex": "[a-f ]{150,160}"},
    },
]


@pytest.fixture(scope="module")
def replicas_url(ray_running, tiny_spec):
    start = Start(deployment.deployment_of(tiny_spec, CHAIN), queue=32, replicas=2)
    with deployment.serving(start, port=free_port()) as url:
        yield url
    serve.shutdown()


def answer(replicas_url, body):
    """The choices of a streamed answer."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    with http.stream("POST", replicas_url + PATH, json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for part in event["choices"]:
                told = choices.setdefault(part["index"], {"text": "", "tokens": [], "logprobs": []})
                told["text"] += part["text"]
                if part["logprobs"]:
                    told["tokens"] += part["logprobs"]["tokens"]
                    told["logprobs"] += part["logprobs"]["token_logprobs"]
                told["finish"] = part["finish_reason"] or told.get("finish")
    del usage["prompt_tokens_details"]  # depends on the replica
    return [choices[index] | {"usage": usage} for index in sorted(choices)]


def health(replicas_url):
    return dict(http.get(f"{replicas_url}/health").json())


@pytest.fixture(scope="module")
def expected(replicas_url):
    """What is answered when nothing happens, to one request after the other."""
    return [answer(replicas_url, body) for body in BODIES]


@pytest.mark.long
def test_a_killed_engine_on_placed_devices_changes_no_text(ray_running, tiny_spec):
    start = Start(deployment.deployment_of(tiny_spec, CHAIN), placement=Placement())
    with deployment.serving(start, port=free_port()) as url, ThreadPoolExecutor(2) as pool:
        whole = [answer(url, body) for body in BODIES[:2]]
        running = [pool.submit(answer, url, body) for body in BODIES[:2]]
        wait_until(lambda: health(url)["running"] == 2)
        for holder in children("ray::EngineHolder"):
            holder.kill()
        assert [each.result() for each in running] == whole
        wait_until(lambda: health(url)["restarts"] == 1)
    serve.shutdown()


@pytest.mark.long
def test_replicas_answer_as_one_server(replicas_url, expected):
    status = health(replicas_url)
    assert (status["ready"], status["slots"], status["running"]) == (True, 8, 0)
    names = {replica["replica"] for replica in status["replicas"]}
    assert len(names) == 2
    assert {replica["configuration"] for replica in status["replicas"]} == {CHAIN.id}
    page = http.get(f"{replicas_url}/metrics").text
    assert all(f'replica="{name}"' in page for name in names)
    assert 'specdec:replicas{model_name="llama"} 2.0' in page.replace(status["model"], "llama")
    empty = http.post(replicas_url + PATH, json={"prompt": ""})  # what only an engine refuses
    assert (empty.status_code, "empty" in empty.text) == (400, True)


@pytest.mark.long
def test_a_deployment_reaches_every_replica_and_changes_no_text(replicas_url, expected, tiny_spec):
    server = find_server(replicas_url)
    with ThreadPoolExecutor(len(BODIES)) as pool:
        running = [pool.submit(answer, replicas_url, body) for body in BODIES]
        server.deploy(deployment.deployment_of(tiny_spec, LOOKUP))
        assert [each.result() for each in running] == expected
    status = health(replicas_url)
    assert (status["configuration"], status["switches"]) == (LOOKUP.id, 1)
    assert {replica["configuration"] for replica in status["replicas"]} == {LOOKUP.id}
    unknown = configured({"kind": "draft_model", "draft": "nobody"}, COUPLED)
    with pytest.raises(UserError, match="nobody"):
        server.deploy(deployment.deployment_of(tiny_spec, unknown))
    assert server.roll_back().configuration == CHAIN


@pytest.mark.long
def test_a_killed_replica_changes_no_text(replicas_url, expected):
    victim, _ = children("ray::EngineHolder")
    with ThreadPoolExecutor(len(BODIES)) as pool:
        running = [pool.submit(answer, replicas_url, body) for body in BODIES]
        wait_until(
            lambda: all(replica["running"] >= 2 for replica in health(replicas_url)["replicas"])
        )
        for process in (victim, *victim.children()):
            process.kill()
        for each, wanted in zip(running, expected, strict=True):
            for got, whole in zip(each.result(), wanted, strict=True):
                # The other replica's forwards add in another order.
                assert got.pop("logprobs") == pytest.approx(whole["logprobs"], abs=1e-4)
                assert got == {key: value for key, value in whole.items() if key != "logprobs"}
    assert "specdec:requests_resumed_total" in http.get(f"{replicas_url}/metrics").text
    assert http.get(f"{replicas_url}/ready").json() == {"ready": True}
    wait_until(
        lambda: health(replicas_url)["restarts"] == 1 and len(children("ray::EngineHolder")) == 2
    )
    assert [answer(replicas_url, body) for body in BODIES[:2]] == expected[:2]
