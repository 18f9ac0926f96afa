"""Two engines behind one ingress answer as one server, also when one of them is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from cluster.serving.control import find_server
from cluster.serving.deployment import serving
from cluster.serving.http.access import Access
from cluster.serving.http.limits import RequestLimits
from cluster.serving.replicas.number import Replicas
from cluster.serving.served import Deployment
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine.scheduler import Limits

COUPLED = Sampling(temperature=0.9, coupling="gumbel")
CHAIN = Configuration(
    drafter=DraftModelSettings(policy=FixedSettings(max_tokens=4)), sampling=COUPLED
)
LOOKUP = Configuration(drafter=PromptLookupSettings(), sampling=COUPLED)
LIMITS = Limits(4, share_prefixes=True)
PATH = "/v1/completions"
LONG = {"max_tokens": 200, "ignore_eos": True}
# Greedy and coupled texts, with what counts the tokens before.
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

pytestmark = pytest.mark.long

http = httpx.Client(timeout=120)  # nothing here is about speed


@pytest.fixture(scope="module")
def url(ray_running: None, tiny_spec: PairSpec) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    access = Access(limits=RequestLimits(tokens=200))
    server = serving(
        tiny_spec, CHAIN, limits=LIMITS, port=port, access=access, replicas=Replicas(2, 2)
    )
    with server as url:
        yield url
    serve.shutdown()


def answer(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
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
    assert usage is not None
    del usage["prompt_tokens_details"]  # which replica has read it before
    return [choices[index] | {"usage": usage} for index in sorted(choices)]


def health(url: str) -> dict[str, Any]:
    return dict(http.get(f"{url}/health").json())


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def counted(url: str, name: str) -> float:
    """The sum of a metric over all its series."""
    page = http.get(f"{url}/metrics").text
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.M)))


def replica_processes() -> list[int]:
    """The processes of the replicas with engines, without those of the engines themselves."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"ServeReplica:specdec:engines" in command:
            found.append(int(folder.name))
    return found


def children(process: int) -> list[int]:
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for file in threads for child in file.read_text().split()]


@pytest.fixture(scope="module")
def expected(url: str) -> list[list[dict[str, Any]]]:
    """What is answered when nothing happens, to one request after the other."""
    return [answer(url, body) for body in BODIES]


def test_replicas_answer_as_one_server(url, expected):
    said = health(url)
    assert (said["ready"], said["slots"], said["running"]) == (True, 8, 0)
    names = [replica["replica"] for replica in said["replicas"]]
    assert len(set(names)) == 2
    assert {replica["configuration"] for replica in said["replicas"]} == {CHAIN.id}
    assert http.get(f"{url}/ready").json() == {"ready": True}
    page = http.get(f"{url}/metrics").text
    assert all(f'replica="{name}"' in page for name in names)
    assert counted(url, "vllm:request_success_total") == len(BODIES) + 1  # `n`
    refused = http.post(url + PATH, json={"prompt": "x", "max_tokens": 201})
    assert refused.status_code == 400
    empty = http.post(url + PATH, json={"prompt": ""})  # what only an engine refuses
    assert (empty.status_code, "empty" in empty.text) == (400, True)


def test_a_text_goes_on_where_its_beginning_is(url):
    prompt = "def main(arguments):\n    return arguments\n" * 2
    routed = re.compile(r'requests_routed_total{.*reason="prefix"} (\S+)')

    def by_prefix() -> float:
        (count,) = routed.findall(http.get(f"{url}/metrics").text)
        return float(count)

    before, hits = by_prefix(), health(url)["prefix_hits"]
    for turn in ("a", "ab", "abc"):
        assert http.post(url + PATH, json={"prompt": prompt + turn, "max_tokens": 4}).is_success
    assert by_prefix() == before + 2
    assert health(url)["prefix_hits"] >= hits + 2


def test_a_client_that_leaves_frees_its_slot_at_the_replica(url):
    cancelled = health(url)["cancelled"]
    body = {**BODIES[0], "prompt": ["x"] * 64, "stream": True}
    with http.stream("POST", url + PATH, json=body) as stream:
        lines = stream.iter_lines()  # httpx leaves when it is collected
        next(lines)
        assert health(url)["running"] > 0
    wait(lambda: health(url)["running"] == 0)
    assert health(url)["cancelled"] > cancelled


def test_a_deployment_reaches_every_replica_and_changes_no_text(url, expected, tiny_spec):
    server = find_server(url)
    with ThreadPoolExecutor(len(BODIES)) as pool:
        running = [pool.submit(answer, url, body) for body in BODIES]
        server.deploy(Deployment(pair=tiny_spec, configuration=LOOKUP))
        assert [each.result() for each in running] == expected
    said = health(url)
    assert (said["configuration"], said["switches"]) == (LOOKUP.id, 1)
    assert {replica["configuration"] for replica in said["replicas"]} == {LOOKUP.id}
    unknown = Configuration(drafter=DraftModelSettings(draft="nobody"), sampling=COUPLED)
    with pytest.raises(UserError, match="nobody"):
        server.deploy(Deployment(pair=tiny_spec, configuration=unknown))
    assert server.roll_back().configuration == CHAIN
    assert {replica["configuration"] for replica in health(url)["replicas"]} == {CHAIN.id}


def test_a_killed_replica_changes_no_text(url, expected):
    before = set(replica_processes())
    assert len(before) == 2
    victim = before.pop()
    engine = children(victim)
    with ThreadPoolExecutor(len(BODIES)) as pool:
        running = [pool.submit(answer, url, body) for body in BODIES]
        wait(lambda: all(replica["running"] >= 2 for replica in health(url)["replicas"]))
        for process in (victim, *engine):
            os.kill(process, signal.SIGKILL)
        for each, wanted in zip(running, expected, strict=True):
            for got, whole in zip(each.result(), wanted, strict=True):
                # Another forward reads the tokens again, and adds in another order.
                assert got.pop("logprobs") == pytest.approx(whole["logprobs"], abs=1e-4)
                assert got == {key: value for key, value in whole.items() if key != "logprobs"}
    assert counted(url, "specdec:requests_resumed_total") > 0
    assert http.get(f"{url}/ready").json() == {"ready": True}
