"""Two engines behind one ingress answer as one server, also when one of them is killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from ray import serve

from cluster.serving.control import find_server
from cluster.serving.deployment import serving
from cluster.serving.http.access import Access
from cluster.serving.http.limits import Allowance, RequestLimits
from cluster.serving.replicas.number import Replicas
from cluster.serving.served import Deployment
from cluster.serving.server_process import free_port
from dashboards.store import connect, experiment_id_of
from jobs import deploy
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, Sampling
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine.scheduler import Limits
from tests.dashboards.tracking.test_sweep_run import certificate_of
from tests.registered import appointed

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

ROOT = Path(__file__).parents[4]
KEYS = {name: hashlib.sha256(name.encode()).digest() for name in ("one", "other")}
ACCESS = Access(tuple(KEYS.values()), Allowance(tokens=30_000), RequestLimits(tokens=200))
QUEUE = 32

http = httpx.Client(timeout=120, headers={"authorization": "Bearer one"})  # none is about speed


@contextmanager
def served(spec: PairSpec, replicas: Replicas) -> Iterator[str]:
    """The address of a server."""
    options = {"limits": LIMITS, "port": free_port(), "access": ACCESS, "queue": QUEUE}
    with serving(spec, CHAIN, replicas=replicas, **options) as url:
        yield url
    serve.shutdown()


@pytest.fixture(scope="module")
def url(ray_running: None, tiny_spec: PairSpec) -> Iterator[str]:
    with served(tiny_spec, Replicas(2, 2)) as url:
        yield url


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


def called(port: int) -> grpc.StatusCode:
    """What a call of a replica's method by gRPC ends with, without Ray's token."""
    method = "/ray.serve.ASGIService/HandleRequest"
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as end:
        channel.unary_unary(method)(b"", timeout=10)
    code: grpc.StatusCode = end.value.code()
    return code


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


def test_a_replicas_own_port_asks_for_rays_token(url):
    for process in map(psutil.Process, replica_processes()):
        ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"}
        codes = {called(port) for port in ports}
        assert grpc.StatusCode.UNAUTHENTICATED in codes
        assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}


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


def test_tokens_of_a_key_and_the_queue_count_over_all_replicas(url):
    """Two submissions of 64 texts fill both replicas, and take 25,600 tokens of a key's 30,000."""
    body = {"prompt": ["x"] * 64, "stream": True, **LONG}
    with ExitStack() as streams:
        for _ in range(2):
            stream = streams.enter_context(http.stream("POST", url + PATH, json=body))
            lines = stream.iter_lines()
            next(lines)
            streams.callback(lines.close)
        assert all(replica["waiting"] > QUEUE for replica in health(url)["replicas"])
        assert http.get(f"{url}/ready").status_code == 503
        for key, reason in (("one", "tokens a minute"), ("other", "are waiting already")):
            headers = {"authorization": f"Bearer {key}"}
            refused = http.post(url + PATH, json=body, headers=headers)
            assert (refused.status_code, reason in refused.text) == (429, True), refused.text
            assert int(refused.headers["retry-after"]) >= 1
        assert counted(url, "specdec:requests_refused_total") == 1  # the queues' alone
    wait(lambda: health(url)["running"] == 0)
    assert http.post(url + PATH, json={"prompt": "x", "max_tokens": 200}).is_success


def test_a_new_champion_is_followed_by_all_replicas_or_none(url, tiny_spec, tmp_path, monkeypatch):
    shutil.copytree(workspace() / "servers", tmp_path / "servers")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    appointed(tiny_spec, LOOKUP)
    follow = f"from jobs.deploy import follow_champion; follow_champion({url!r}, None, 0.5)"
    command = [sys.executable, "-c", follow]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            certificate_of(tiny_spec, LOOKUP).save()  # until then it is not served
            assert "serving" in process.stdout.readline()
            served = {replica["configuration"] for replica in health(url)["replicas"]}
            assert served == {LOOKUP.id}
            unknown = Configuration(drafter=DraftModelSettings(draft="nobody"), sampling=COUPLED)
            certificate_of(tiny_spec, unknown).save()
            appointed(tiny_spec, unknown)
            while "nobody" not in (line := process.stdout.readline()):
                assert line
            served = {replica["configuration"] for replica in health(url)["replicas"]}
            assert served == {LOOKUP.id}
        finally:
            process.kill()
    assert find_server(url).roll_back().configuration == CHAIN


def test_what_a_replica_learns_the_others_know(url, tiny_spec):
    arms = [LOOKUP.drafter, CHAIN.drafter]
    bandit = Configuration(drafter=BanditSettings(arms=arms), sampling=COUPLED)
    find_server(url).deploy(Deployment(pair=tiny_spec, configuration=bandit))

    def known() -> int:
        """Rounds that the replica knows of that knows most."""
        return sum(arm["rounds"] for arm in health(url)["arms"])

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda n: answer(url, {**BODIES[0], "prompt": "x" * n}), range(1, 5))]
    before = known()
    assert before > 0
    wait(lambda: known() > before)  # nobody asks any more
    assert find_server(url).roll_back().configuration == CHAIN


def test_a_canarys_end_reaches_every_replica_and_is_logged_once(
    url, tiny_spec, tmp_path, monkeypatch
):
    """The champion drafts 40 tokens a round, the challenger 4."""
    server = find_server(url)
    slow = CHAIN.model_copy(
        update={"drafter": DraftModelSettings(policy=FixedSettings(max_tokens=40))}
    )
    server.deploy(Deployment(pair=tiny_spec, configuration=slow))
    switches = health(url)["switches"]
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(deploy, "_LOOK", 0.1)
    challenger = Deployment(pair=tiny_spec, configuration=CHAIN)
    taken: list[str] = []
    body = {"max_tokens": 16, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(deploy._try_out, server, challenger, 0.5)
        while not following.done():
            said = http.post(url + PATH, json=body | {"prompt": str(len(taken))}).json()
            taken.append(said["specdec"]["configuration"])
        following.result()
    said = health(url)
    assert said["canary"]["state"] == "promoted"
    assert (said["configuration"], said["switches"]) == (CHAIN.id, switches + 1)
    wait(lambda: {each["configuration"] for each in health(url)["replicas"]} == {CHAIN.id})
    tried = Counter(taken[taken.index(CHAIN.id) : len(taken) - taken[::-1].index(slow.id)])
    assert tried[CHAIN.id] / tried.total() == pytest.approx(0.5, abs=0.2)
    client = connect()
    runs = client.search_runs([experiment_id_of(client, server.name)])
    assert [run.data.tags["state"] for run in runs] == ["promoted"]
    assert runs[0].data.params["champion"] == slow.id
    assert server.roll_back().configuration == slow


def test_a_deployment_during_a_canary_ends_it(url, tiny_spec):
    server = find_server(url)
    server.deploy(Deployment(pair=tiny_spec, configuration=LOOKUP), 0.5)
    assert health(url)["canary"]["state"] == "running"
    server.deploy(Deployment(pair=tiny_spec, configuration=CHAIN))
    assert health(url)["canary"]["state"] == "dropped"
    assert {each["configuration"] for each in health(url)["replicas"]} == {CHAIN.id}


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
