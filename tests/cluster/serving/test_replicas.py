"""Replicas answer as one server, whatever ends meanwhile: a replica, an engine, a deployment."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray import serve

from cluster.serving import deployment
from cluster.serving.control import find_server
from cluster.serving.start import Start
from specdec_core.base.errors import UserError
from specdec_core.config import Placement, Sampling
from specdec_core.servers.process import free_port
from tests.commands import children, wait_until
from tests.specdec_core.kinds import chain, configured

http = httpx.Client(timeout=120)  # no test is about speed

pytestmark = pytest.mark.long

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
def url(ray_running, tiny_spec):
    start = Start(deployment.deployment_of(tiny_spec, CHAIN), queue=32, replicas=2)
    with deployment.serving(start, port=free_port()) as url:
        yield url
    serve.shutdown()


def answer(url, body):
    """The choices of a streamed answer."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    with http.stream("POST", url + PATH, json=body) as stream:
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


def health(url):
    return dict(http.get(f"{url}/health").json())


@pytest.fixture(scope="module")
def expected(url):
    """What is answered when nothing happens, to one request after the other."""
    return [answer(url, body) for body in BODIES]


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


def test_replicas_answer_as_one_server(url, expected):
    status = health(url)
    assert (status["ready"], status["slots"], status["running"]) == (True, 8, 0)
    names = {replica["replica"] for replica in status["replicas"]}
    assert len(names) == 2
    assert {replica["configuration"] for replica in status["replicas"]} == {CHAIN.id}
    page = http.get(f"{url}/metrics").text
    assert all(f'replica="{name}"' in page for name in names)
    assert 'specdec:replicas{model_name="llama"} 2.0' in page.replace(status["model"], "llama")
    empty = http.post(url + PATH, json={"prompt": ""})  # what only an engine refuses
    assert (empty.status_code, "empty" in empty.text) == (400, True)


def test_a_deployment_reaches_every_replica_and_changes_no_text(url, expected, tiny_spec):
    server = find_server(url)
    with ThreadPoolExecutor(len(BODIES)) as pool:
        running = [pool.submit(answer, url, body) for body in BODIES]
        server.deploy(deployment.deployment_of(tiny_spec, LOOKUP))
        assert [each.result() for each in running] == expected
    status = health(url)
    assert (status["configuration"], status["switches"]) == (LOOKUP.id, 1)
    assert {replica["configuration"] for replica in status["replicas"]} == {LOOKUP.id}
    unknown = configured({"kind": "draft_model", "draft": "nobody"}, COUPLED)
    with pytest.raises(UserError, match="nobody"):
        server.deploy(deployment.deployment_of(tiny_spec, unknown))
    assert server.roll_back().configuration == CHAIN


def test_a_killed_replica_changes_no_text(url, expected):
    victim, _ = children("ray::EngineHolder")
    with ThreadPoolExecutor(len(BODIES)) as pool:
        running = [pool.submit(answer, url, body) for body in BODIES]
        wait_until(lambda: all(replica["running"] >= 2 for replica in health(url)["replicas"]))
        for process in (victim, *victim.children()):
            process.kill()
        for each, wanted in zip(running, expected, strict=True):
            for got, whole in zip(each.result(), wanted, strict=True):
                # The other replica's forwards add in another order.
                assert got.pop("logprobs") == pytest.approx(whole["logprobs"], abs=1e-4)
                assert got == {key: value for key, value in whole.items() if key != "logprobs"}
    assert "specdec:requests_resumed_total" in http.get(f"{url}/metrics").text
    assert http.get(f"{url}/ready").json() == {"ready": True}
    wait_until(lambda: health(url)["restarts"] == 1 and len(children("ray::EngineHolder")) == 2)
    assert [answer(url, body) for body in BODIES[:2]] == expected[:2]
