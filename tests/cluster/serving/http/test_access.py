"""Access: keys, allowances, limits and origins."""

import asyncio
import hashlib
import logging

import pytest

from cluster.serving.http.access import Access, check_exposed, read_keys
from cluster.serving.http.app import build_app
from cluster.serving.http.limits import Allowance, RequestLimits, Window, WindowUse
from cluster.serving.http.pages import Page
from dashboards.pages import PLAYGROUND
from specdec_core.base.errors import UserError
from specdec_core.engine import Engine
from tests.cluster.serving.http.events import client_of
from tests.local_server import service_of

ANNE, BEN = "sk-anne", "sk-ben"
KEYS = tuple(hashlib.sha256(key.encode()).digest() for key in (ANNE, BEN))
BODY = {"prompt": "def main(", "max_tokens": 4}


def client_with(pair, access):
    return client_of(service_of(Engine(pair), access=access))


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_all_routes_but_health_and_ready_need_a_key(chat_pair):
    async with client_with(chat_pair, Access(KEYS)) as http:
        for path in ("/health", "/ready"):
            assert (await http.get(path)).status_code == 200
        document = (await http.get("/openapi.json", headers=bearer(BEN))).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if path in ("/health", "/ready"):
                    assert "security" not in operation
                    continue
                assert operation["security"] == [{"key": []}]
                assert "4XX" in operation["responses"]
                for headers in ({}, bearer("sk-other"), {"Authorization": f"Basic {ANNE}"}):
                    answer = await http.request(method, path, headers=headers)
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"] == "Bearer"
                    error = answer.json()["error"]
                    assert error["code"] == "invalid_api_key"
                    assert "sk-" not in error["message"]
        assert (await http.get("/nothing")).status_code == 401
        assert (await http.get("/openapi.json")).status_code == 401
        for key in (ANNE, BEN):
            answer = await http.post("/v1/completions", json=BODY, headers=bearer(key))
            assert answer.status_code == 200
        for given, message in (
            ("Bearer sk-other", "this API key is not known here"),
            (ANNE, "an API key is needed: Authorization: Bearer KEY"),
            ("Bearer ", "an API key is needed: Authorization: Bearer KEY"),
        ):
            answer = await http.get("/v1/models", headers={"Authorization": given})
            assert answer.json()["error"]["message"] == message


async def test_each_key_has_an_allowance_of_its_own(chat_pair):
    async with client_with(chat_pair, Access(KEYS, Allowance(requests=2))) as http:

        async def ask(key):
            return await http.post("/v1/completions", json=BODY, headers=bearer(key))

        answers = [await ask(ANNE) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        error = answers[2].json()["error"]
        assert error["type"] == "rate_limit_error"
        assert "2 requests a minute" in error["message"]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 60
        assert (await ask(BEN)).status_code == 200


async def test_tokens_are_counted_as_they_were_used(chat_pair):
    prompt = len(chat_pair.tokenizer(BODY["prompt"])["input_ids"])
    allowance = Allowance(tokens=2 * (prompt + 4))
    end = {"logit_bias": {"0": 100}}  # its one token ends the text

    async with client_with(chat_pair, Access(allowance=allowance)) as http:

        async def ask(**more):
            return await http.post("/v1/completions", json={**BODY, **more})

        large = await ask(max_tokens=prompt + 9)
        assert (large.status_code, large.json()["error"]["code"]) == (400, "too_many_tokens")
        assert (await ask(**end)).status_code == 200  # leaves 3 of its tokens
        assert (await ask(max_tokens=7, stream=True)).status_code == 200
        answer = await ask(max_tokens=1)
        assert answer.status_code == 429
        assert "tokens a minute" in answer.json()["error"]["message"]


async def test_a_minutes_tokens_are_refused_by_the_requests_own_field(chat_pair):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 50}
    response = {"input": "hi", "max_output_tokens": 50}

    async with client_with(chat_pair, Access(allowance=Allowance(tokens=40))) as http:
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
            answer = await http.post(path, json=body)
            error, (_, field) = answer.json()["error"], body
            assert (answer.status_code, error["code"]) == (400, "too_many_tokens")
            assert (error["param"], error["message"].partition(":")[0]) == (field, field)


async def test_an_answer_without_a_number_has_no_more_than_a_minutes_tokens(chat_pair):
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "n": 2}

    async with client_with(chat_pair, Access(allowance=Allowance(tokens=101))) as http:
        answer = await http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == (101 - usage["prompt_tokens"]) // 2 * 2
        again = await http.post("/v1/chat/completions", json=chat)
        assert again.status_code == 429


async def test_a_request_is_limited_in_tokens_and_time(chat_pair):
    limits = RequestLimits(tokens=100, seconds=0.05)
    long = {**BODY, "max_tokens": 100, "ignore_eos": True, "n": 8}

    async with client_with(chat_pair, Access(limits=limits)) as http:
        answer = await http.post("/v1/completions", json={**BODY, "max_tokens": 101})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_tokens")
        answer = await http.post("/v1/completions", json=long)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
        answer = await http.post("/v1/completions", json={**long, "stream": True})
        assert "request_timeout" in answer.text.strip().splitlines()[-1]
        health = (await http.get("/health")).json()
        assert (health["running"], health["cancelled"]) == (0, 2)


async def test_waiting_for_an_engine_counts_in_a_requests_time(chat_pair, monkeypatch):
    """One that is loaded again may take minutes."""
    service = service_of(Engine(chat_pair), access=Access(limits=RequestLimits(seconds=0.05)))

    async def loading(_):
        await asyncio.sleep(60)

    monkeypatch.setattr(service, "submit", loading)
    async with client_of(service) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


async def test_a_client_that_leaves_while_it_sends_is_no_failure_of_the_server(chat_pair, caplog):
    app = build_app(service_of(Engine(chat_pair)))
    sent = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    scope |= {"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b""}
    scope |= {"headers": [(b"host", b"here")], "client": ("127.0.0.1", 5), "scheme": "http"}

    async def receive():
        return sent.pop(0)

    async def send(message):
        assert message.get("status") != 500

    await app(scope, receive, send)
    assert not caplog.records


HERE = {"host": "127.0.0.1:8000"}
LINK = {"sec-fetch-mode": "navigate", "sec-fetch-site": "cross-site"}


@pytest.mark.parametrize(
    ("method", "headers", "lets_in"),
    [
        ("POST", {}, True),
        ("POST", {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8000"}, True),
        # Of an encrypted page, behind a proxy that gives the server another name.
        ("POST", {"sec-fetch-site": "same-origin", "origin": "https://llm.example.org"}, True),
        ("POST", {"sec-fetch-site": "none"}, True),
        ("POST", {"origin": "http://127.0.0.1:8000"}, True),
        ("POST", {"host": "Example.org:443", "origin": "https://example.org"}, True),
        ("POST", {"x-forwarded-host": "example.org", "origin": "https://example.org"}, True),
        ("POST", {"sec-fetch-site": "cross-site"}, False),
        ("POST", {"sec-fetch-site": "same-site"}, False),
        ("POST", {"origin": "https://evil.example"}, False),
        ("POST", {"origin": "http://127.0.0.1:3000"}, False),
        ("POST", {"origin": "null"}, False),
        ("POST", {"origin": "http://["}, False),
        ("POST", LINK, False),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, False),
        ("GET", LINK, True),
    ],
)
async def test_a_page_of_another_site_may_not_ask(chat_pair, method, headers, lets_in):
    path, body = ("/", None) if method == "GET" else ("/v1/completions", BODY)

    async with client_of(service_of(Engine(chat_pair)), Page(*PLAYGROUND)) as http:
        answer = await http.request(method, path, json=body, headers=HERE | headers)
        assert answer.status_code == (200 if lets_in else 403)
        if not lets_in:
            error = answer.json()["error"]
            assert error["code"] == "cross_site_request"
            assert "\n" not in error["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
async def test_a_server_without_keys_is_asked_by_names_of_this_machine_alone(chat_pair, path):
    service = service_of(Engine(chat_pair), access=Access(local=True))

    async with client_of(service, Page(*PLAYGROUND)) as http:
        for own in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST", "a.localhost"):
            assert (await http.get(path, headers={"host": own})).status_code == 200
        for other in ("rebound.example:8000", "10.0.0.7", "localhost.example", "[", "a@b:x"):
            answer = await http.get(path, headers={"host": other})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "unknown_host"


async def test_nothing_of_a_request_is_logged(chat_pair, caplog):
    caplog.set_level(logging.DEBUG)
    async with client_with(chat_pair, Access(KEYS)) as http:
        for body in ({**BODY, "prompt": "secret!"}, {**BODY, "prompt": "secret!", "n": 0}):
            await http.post("/v1/completions", json=body, headers=bearer(ANNE))
    assert "secret" not in caplog.text
    assert ANNE not in caplog.text


def test_an_empty_token_of_the_operator_is_no_key():
    assert Access(KEYS).admitting("") == Access(KEYS).admitting(None) == Access(KEYS)
    assert len(Access(KEYS).admitting("secret").keys or ()) == len(KEYS) + 1


def test_a_window_has_room_again_a_minute_later():
    window = Window(10)
    first = window.take(6, now=0.0)
    assert isinstance(first, WindowUse)
    assert isinstance(window.take(4, now=20.0), WindowUse)
    assert window.take(5, now=30.0) == 30
    assert window.take(7, now=30.0) == 50
    first.used = 2
    first.close()
    assert isinstance(window.take(4, now=30.0), WindowUse)
    assert isinstance(window.take(6, now=90.0), WindowUse)
    assert isinstance(Window(None).take(10**9, now=0.0), WindowUse)


def test_a_file_of_keys_has_hashes(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n{KEYS[0].hex()} anne\n{KEYS[1].hex().upper()}  -\n")
    assert read_keys(path) == KEYS
    path.write_text(f"\ufeff{KEYS[0].hex()}\n")  # as some editors begin a file
    assert read_keys(path) == KEYS[:1]
    path.write_text("sk-a-key-in-plain\n")
    with pytest.raises(UserError, match="keys:1: expected") as refused:
        read_keys(path)
    assert "sk-" not in str(refused.value)
    path.write_text("# none\n")
    with pytest.raises(UserError, match="no keys"):
        read_keys(path)
    with pytest.raises(UserError, match="serve keys"):
        read_keys(tmp_path / "missing")


def test_other_machines_need_a_key_unless_it_is_said_that_they_do_not():
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposed(host, None, no_auth=False)
    for host in ("0.0.0.0", "::", "10.0.0.7", "my-host"):
        check_exposed(host, KEYS, no_auth=False)
        check_exposed(host, None, no_auth=True)
        with pytest.raises(UserError, match="--no-auth"):
            check_exposed(host, None, no_auth=False)
