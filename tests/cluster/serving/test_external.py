"""Another program's server behind our HTTP application: what passes through, and what is ours."""

import asyncio
import hashlib
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, closing
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request

from cluster.serving.external.app import (
    ExternalService,
    _asked,
    _counted,
    _prompts,
    build_external_app,
)
from cluster.serving.external.metrics import ExternalMetrics, _sums
from cluster.serving.external.process import LOOK, ExternalServer, Program, log_file
from cluster.serving.fleet import Fleet
from cluster.serving.http.access import OPERATE, Access
from cluster.serving.http.limits import RequestLimits, WindowUse
from cluster.serving.http.routes.deploy import DEPLOY, ROLL_BACK, TOKEN_HEADER
from cluster.serving.served import NOT_OPERATED, Deployment, Operation
from specdec_core.evidence.certificate.certificate import CertifiedServer
from specdec_core.servers.completions import CANDIDATES
from specdec_core.servers.process import running
from specdec_core.servers.server import ServedMode
from specdec_core.servers.table import SERVERS
from tests.commands import children, wait_until
from tests.configurations import SUFFIX, drafting
from tests.dashboards.tracking.test_registry import certificate_of
from tests.external_program import words
from tests.local_server import LocalServer
from tests.specdec_core.kinds import chain, configured
from tests.word_server import WordServer

CHAIN = configured(chain(max_tokens=3))
TREE = drafting("tree", branching=(2, 2))
KEY, TOKEN = "sk-anne", "operator"
LONG = {"prompt": "def main(", "max_tokens": 200}
WHOLE = "".join(words("def main(", 200))


@pytest.fixture(scope="module")
def http(tiny_spec, tmp_path_factory):
    """A client, with a key, of our application in front of one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setitem(SERVERS, "words", WordServer())
        deployment = Deployment(pair=tiny_spec, configuration=CHAIN)
        server = ExternalServer("0", Program("words", "tiny"), deployment)
        server.start()
        fleet = Fleet([server], Operation(TOKEN))
        keys = (hashlib.sha256(KEY.encode()).digest(),)
        access = Access(keys, limits=RequestLimits(tokens=220))
        service = ExternalService(fleet, "tiny", access, queue=8)
        headers = {"Authorization": f"Bearer {KEY}"}
        with (
            running(LocalServer(lambda: build_external_app(service))) as url,
            httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client,
        ):
            yield client


def operate(http, path, wanted=None):
    body = None if wanted is None else wanted.model_dump_json()
    return http.post(path, content=body, headers={TOKEN_HEADER: TOKEN})


def events(http, body):
    """The events of a stream, without its end."""
    answer = http.post("/v1/completions", json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def programs():
    """The processes of the program, without those that end it."""
    keepers = children("keeper.py")
    return [process for process in children("external_program") if process not in keepers]


def text_of(found):
    return "".join(choice["text"] for event in found for choice in event["choices"])


def test_requests_and_answers_pass_through(http):
    tools = [{"type": "function", "function": {"name": "look", "strict": None}}]
    body = {"model": "an-adapter", "prompt": "héllo", "max_tokens": 5, "tools": tools}
    content = json.dumps(body, ensure_ascii=False, indent=3).encode()
    answer = http.post("/v1/completions", content=content).json()
    assert answer == {"choices": [{"text": "".join(words("héllo", 5))}], "asked": body}
    found = events(http, body)
    assert text_of(found) == "".join(words("héllo", 5))
    assert all(event.keys() == {"choices", "reasoning"} for event in found)
    refused = http.post("/v1/completions", json={**body, "effort": "low"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "unknown: effort")
    names = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert names == ["tiny", "an-adapter"]


def test_keys_limits_health_and_metrics_are_ours(http, monkeypatch):
    assert http.get("/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401
    refused = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 221})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert http.get("/nothing").status_code == 404
    with monkeypatch.context() as patch:  # a hub may take its time
        patch.setattr("specdec_core.models.pair.load_config", lambda name: pytest.fail(name))
        health = http.get("/health").json()
    assert (health["configuration"], health["slots"], health["queue"]) == (CHAIN.id, 4, 8)
    assert health["engine"] == "words"
    assert health["chat"] is False  # its tokenizer has no template
    page = http.get("/metrics").text
    assert "\nspecdec:replicas 1.0\n" in page
    [generated] = [line for line in page.split("\n") if line.startswith("vllm:generation_tokens_t")]
    assert float(generated.split()[-1]) > 0


def test_the_share_of_accepted_candidates_is_read_of_any_program():
    page = "# TYPE llamacpp:spec_decode_num_draft_tokens_total counter\n"
    page += "llamacpp:spec_decode_num_draft_tokens_total 40\n"
    assert _sums(page) == {CANDIDATES: 40}
    assert _sums(page.replace("llamacpp", "vllm")) == {CANDIDATES: 40}


def test_old_logs_are_removed(bare_home):
    for age in range(60):
        file = log_file(f"words-{age}")
        file.touch()
        os.utime(file, (1000 - age, 1000 - age))
    kept = {file.name for file in log_file("next").parent.iterdir()}
    assert len(kept) == 50
    assert {"words-0.log", "words-59.log"} & kept == {"words-0.log"}


def test_a_log_that_another_replica_removes_meanwhile_is_no_error(bare_home):
    log_file("words-0").with_name("gone.log").symlink_to("nowhere")
    assert log_file("next").name == "next.log"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_completion_tokens": 1, "max_tokens": 221},
        {"max_tokens": 1, "n_predict": 221},
        {"max_tokens": -1},
        {},  # up to the end of the context
        {"max_tokens": float("inf")},
        {"max_tokens": 1, "n": -1},
    ],
)
def test_no_field_passes_the_limit_of_tokens(http, fields):
    body = json.dumps({"prompt": "a", **fields}).replace("Infinity", "1e999")
    answer = http.post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_body_that_is_nested_too_deep_is_refused(http):
    assert http.post("/v1/completions", content="[" * 100_000).status_code == 400


def test_every_prompt_counts_and_unused_tokens_are_given_back(tiny_spec):
    assert _prompts(["a", "b"]) == _prompts([[1], [2, 3]]) == 2
    assert _prompts([1, 2]) == _prompts("ab") == _prompts(None) == 1

    async def left(answer, prompt):
        taken = WindowUse(0.0, 1000)
        async for _ in _counted(_chunks(answer), taken, prompt):
            pass
        return taken.amount

    async def _chunks(answer):
        for chunk in answer:
            yield chunk

    usage = [b'{"choices": [], "usage": {"total_', b'tokens": 30}}']
    assert asyncio.run(left(usage, 10)) == 30
    assert asyncio.run(left([b"x" * 40], 10)) == 20
    assert asyncio.run(left([b"refused"], None)) == 0


@pytest.mark.parametrize(
    "path",
    ["/v1/%2e%2e/adapters", "/v1/a%0A", "/v1/a%3Fb", "/v1/%2e%2e", "/v1/specdec/deploys"],
)
def test_no_path_leads_out_of_those_that_pass(http, path):
    assert http.get(path).status_code == 404


async def test_without_a_token_the_paths_that_operate_a_server_lead_nowhere(tiny_spec, monkeypatch):
    """They need no key, which another program's answers do."""
    monkeypatch.setitem(SERVERS, "words", WordServer())
    deployment = Deployment(pair=tiny_spec, configuration=CHAIN)
    fleet = Fleet([ExternalServer("0", Program("words", "tiny"), deployment)], NOT_OPERATED)
    access = Access((hashlib.sha256(KEY.encode()).digest(),))
    app = build_external_app(ExternalService(fleet, "tiny", access, queue=8))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        for path in OPERATE:
            for method in ("GET", "POST"):
                assert (await http.request(method, path)).status_code == 404


def test_headers_pass_as_bytes_and_ours_do_not(http):
    given = {b"X-Title": "Müller".encode(), b"Connection": b"x-hop", b"X-Hop": b"1"}
    given |= {TOKEN_HEADER.encode(): TOKEN.encode(), b"Accept-Encoding": b"br"}
    answer = http.get("/v1/headers", headers=given)
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    found = {name.lower(): value for name, value in answer.json()}
    assert found["x-title"].encode("latin-1") == "Müller".encode()
    assert found["accept-encoding"] == "br"
    assert found.keys().isdisjoint({"x-hop", TOKEN_HEADER})
    assert KEY not in found["authorization"]
    [server] = [p for p in children("external_program") if "keeper" not in " ".join(p.cmdline())]
    url = f"http://127.0.0.1:{server.cmdline()[-1]}/v1/headers"
    assert httpx.get(url, trust_env=False).status_code == 401  # at the port of the program


def test_a_deployment_replaces_the_process_and_is_rolled_back(http, tiny_spec):
    elsewhere = tiny_spec.with_runner(max_length=32, target_dtype="bfloat16")
    wanted = Deployment(pair=elsewhere, configuration=SUFFIX)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(events, http, LONG)
        served = operate(http, DEPLOY, wanted).json()
        assert served["configuration"] == wanted.model_dump(mode="json")["configuration"]
        # It keeps the context and the type that the server was started with.
        assert served["pair"] == tiny_spec.model_dump(mode="json")
        assert text_of(under_way.result()) == WHOLE
    assert http.get("/health").json()["configuration"] == SUFFIX.id
    assert text_of(events(http, LONG)) == WHOLE
    impossible = operate(http, DEPLOY, Deployment(pair=tiny_spec, configuration=TREE))
    assert impossible.status_code == 400
    assert "words has no counterpart of" in impossible.json()["error"]["message"]
    assert operate(http, f"{DEPLOY}?canary=0.1", wanted).status_code == 400
    assert operate(http, ROLL_BACK).status_code == 200
    health = http.get("/health").json()
    assert (health["configuration"], health["switches"]) == (CHAIN.id, 2)
    wait_until(lambda: len(programs()) == 1)  # the old ones end


def test_a_killed_process_is_started_again_and_no_request_hangs(http):
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(events, http, LONG) for _ in range(4)]
        answers = [pool.submit(http.post, "/v1/completions", json=LONG) for _ in range(4)]
        wait_until(lambda: http.get("/health").json()["running"] == 8, 30)
        for process in programs():
            process.kill()
        found = [stream.result() for stream in streams]
        codes = [answer.result() for answer in answers]
    # All eight were under way. In a stream that has begun, the error is the last event.
    assert [answer.status_code for answer in codes] == [503] * 4
    last = [answer.json() for answer in codes] + [stream[-1] for stream in found]
    assert {each["error"]["code"] for each in last} == {"server_ended"}
    wait_until(lambda: http.get("/health").json()["restarts"])
    wait_until(lambda: http.get("/ready").status_code == 200)
    assert text_of(events(http, LONG)) == WHOLE


def test_a_front_end_whose_engine_has_ended_answers_for_nothing(http):
    for stream in (False, True):
        restarts = http.get("/health").json()["restarts"]
        asked = {"prompt": "the engine ends", "max_tokens": 1}
        if stream:
            told = [each["error"]["code"] for each in events(http, asked) if "error" in each]
            assert told == ["server_ended"]  # the program's own error does not pass
        else:
            answer = http.post("/v1/completions", json=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_ended")
        wait_until(lambda: http.get("/health").json()["restarts"] > restarts)  # noqa: B023
        wait_until(lambda: http.get("/ready").status_code == 200)


def test_a_server_with_requests_that_counts_no_token_is_idle(tiny_spec):
    deployment = Deployment(pair=tiny_spec, configuration=CHAIN)
    server = ExternalServer("0", Program("words", "tiny"), deployment)
    long_ago = time.monotonic() - 1000
    for counts, idle in ([5.0], False), ([5.0], True), ([6.0], False), ([], False):
        server.running, server.worked = 1, long_ago
        server.has_counted(tuple(counts))
        assert (server.idle > 900) == idle
    server.running, server.worked = 0, long_ago
    assert server.idle == 0


@asynccontextmanager
async def programs_server(spec, metrics=None, content=b""):
    """The server of a program with a request under way, whose `/health` answers, and `/metrics`
    with this status. With None that hangs, as llama-server's while its main loop does."""

    async def answer(reader, writer):
        path = (await reader.readline()).decode().split()[1]
        status = 200 if path == "/health" else metrics
        if status is None:
            await reader.read()  # until the client gives up
        else:
            head = f"HTTP/1.1 {status} -\r\ncontent-length: {len(content)}\r\nconnection: close"
            writer.write(head.encode() + b"\r\n\r\n" + content)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    deployment = Deployment(pair=spec, configuration=CHAIN)
    server = ExternalServer("0", Program("words", "tiny", patience=1), deployment)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    server.running = 1
    try:
        yield server
    finally:
        await server.close()
        listening.close()


@pytest.mark.parametrize(("metrics", "idle"), [(None, True), (404, False)])
async def test_a_server_whose_metrics_do_not_answer_has_counted_nothing(
    tiny_spec, monkeypatch, metrics, idle
):
    monkeypatch.setattr("cluster.serving.external.process._ANSWER", 0.2)
    async with programs_server(tiny_spec, metrics) as server:
        server.worked = time.monotonic() - 1000
        await ExternalMetrics(Fleet([server])).look()
        assert (server.idle > 900) == idle
        assert await server.probe() != idle


async def test_a_server_counts_until_its_counts_were_looked_at_twice(tiny_spec):
    async with programs_server(tiny_spec) as server:
        for seconds, works in ((LOOK + 5, True), (2 * LOOK + 5, False)):
            server.worked = time.monotonic() - seconds
            assert await server.probe() == works


async def test_a_client_that_does_not_read_makes_no_server_look_hung(tiny_spec):
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    request = Request({**scope, "headers": [], "server": ("here", 80), "scheme": "http"})
    async with programs_server(tiny_spec, 200, b"data: [DONE]\n\n") as server:
        server.running = 0
        service = SimpleNamespace(choose=lambda: server, metrics=ExternalMetrics(Fleet([server])))

        async with aclosing(_asked(service, request, b"")) as parts:
            await anext(parts)  # the head
            assert await anext(parts) == b"data: [DONE]\n\n"
            server.worked = time.monotonic() - 1000
            assert server.idle == 0
            assert await server.probe()
            async with aclosing(_asked(service, request, b"")) as other:
                await anext(other)
                assert server.idle < 900  # since this one has begun
                server.worked = time.monotonic() - 1000
                assert server.idle > 900
            server.running += 1  # as of another client
            assert [part async for part in parts] == []
            assert server.idle < 900
        server.running -= 1
        assert (server.running, server.delivering) == (0, 0)


def test_a_certificate_names_what_is_different_here(tiny_spec, bare_home):
    settings = {"prefix": False, "dtype": "float32"}
    server = CertifiedServer(name="words", version="1", settings=settings, reference="itself")
    certificate = certificate_of(tiny_spec, CHAIN).model_copy(update={"server": server})
    certificate.save()
    certified = Deployment(pair=tiny_spec, configuration=CHAIN, certificate=certificate.sentence)

    def said(version, arguments, **changed):
        program = Program("words", "tiny", arguments=arguments)
        server = ExternalServer("0", program, certified)
        server._mode = ServedMode(version, {**settings, **changed}, lambda *_: [], {})
        server.describe(certified)
        return server.deployment.certificate

    assert said("1", ()) == certificate.sentence
    other = "; here with other settings: prefix, version (2), --enable-lora"
    assert said("2", ("--enable-lora",), prefix=True) == certificate.sentence + other


def test_a_deployment_that_is_given_up_leaves_no_process(http, tiny_spec, monkeypatch):
    def served(*_):  # it never answers
        return ServedMode("words 1", {}, lambda slots, port: ["sleep", "1000"], os.environ)

    monkeypatch.setattr(WordServer, "served", served)
    wanted = Deployment(pair=tiny_spec, configuration=SUFFIX)
    port = http.base_url.port
    assert port is not None
    with closing(socket.create_connection((http.base_url.host, port))) as client:
        content = wanted.model_dump_json().encode()
        headers = {**http.headers, TOKEN_HEADER: TOKEN, "content-length": str(len(content))}
        lines = [f"POST {DEPLOY} HTTP/1.1", "host: here"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        client.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        wait_until(lambda: children("sleep 1000"))
        client.close()
        wait_until(lambda: not children("sleep 1000"))
    assert http.get("/health").json()["configuration"] == CHAIN.id
