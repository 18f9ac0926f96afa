"""`/openapi.json` says what may be asked and what is answered."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cluster.serving.engine_process import EngineProcess
from cluster.serving.http.access import Access
from cluster.serving.http.app import build_app
from cluster.serving.http.bodies import MAX_BODY_BYTES
from cluster.serving.http.limits import RequestLimits
from specdec_core.engine import Engine
from specdec_core.models.pair import load_pair
from tests.configurations import BANDIT
from tests.local_server import service_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What no schema says: how long a prompt is with its new tokens, and which values go together.
BEYOND = {
    "chat_template_failed",
    "context_length_exceeded",
    "conflicting_parameters",
    "invalid_grammar",
    "model_not_found",
    "too_many_choices",
    "too_many_tokens",
    "tools_not_supported",
    "unknown_token",
}
JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
)
JUNK |= st.lists(JUNK, max_size=3) | st.dictionaries(st.text(max_size=3), JUNK, max_size=2)


class Api:
    """The application in this process, and what it says of itself."""

    def __init__(self, engine, runner, stack):
        self.engine, self.run = engine, runner.run
        app = build_app(service_of(engine, access=Access(limits=RequestLimits(tokens=8))))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        self.run(stack.enter_async_context(app.router.lifespan_context(app)))
        self.document = self.run(self.http.get("/openapi.json")).json()

    def validator(self, schema):
        return Draft202012Validator({**schema, "components": self.document["components"]})

    def ask(self, method, path, **request):
        """The answer, if its status and its body are documented."""
        answer = self.run(self.http.request(method, path, **request))
        route = "/v1/models/{name}" if path.startswith("/v1/models/") else path
        operations = self.document["paths"][route]
        operation = operations.get(method.lower()) or next(iter(operations.values()))
        kind, _, _ = answer.headers["content-type"].partition(";")
        responses, status = operation["responses"], str(answer.status_code)
        content = responses.get(status, responses.get(f"{status[0]}XX"))["content"][kind]
        if kind == "application/json":
            self.validator(content["schema"]).validate(answer.json())
            return answer
        *events, end = answer.text.split("\n\n")
        assert (events[-1], end) == ("data: [DONE]", "")
        _, inner = content["itemSchema"]["properties"]["data"]["anyOf"]
        for event in events:
            data = event.removeprefix("data: ")
            self.validator(content["itemSchema"]).validate({"data": data})
            if data != "[DONE]":
                self.validator(inner["contentSchema"]).validate(json.loads(data))
        return answer

    def values(self, schema):
        """What `schema` allows, as far as its keywords are known here."""
        match schema:
            case {"$ref": reference}:
                return st.deferred(lambda: self.values(resolved(self.document, reference)))
            case {"anyOf": schemas} | {"oneOf": schemas}:
                return st.one_of(map(self.values, schemas))
            case {"enum": values}:
                return st.sampled_from(values)
            case {"const": value}:
                return st.just(value)
            case {"type": "null"}:
                return st.none()
            case {"type": "boolean"}:
                return st.booleans()
            case {"type": "integer"}:
                return st.integers(schema.get("minimum"), min(schema.get("maximum", 9), 2**31))
            case {"type": "number"}:
                return st.floats(
                    schema.get("minimum", schema.get("exclusiveMinimum")),
                    schema.get("maximum"),
                    exclude_min="exclusiveMinimum" in schema,
                    allow_infinity=False,
                )
            case {"type": "string"}:
                return st.text(min_size=schema.get("minLength", 0), max_size=4)
            case {"type": "array"}:
                least, most = schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)
                if not most:
                    return st.just([])
                return st.lists(self.values(schema["items"]), min_size=least, max_size=most)
            case {"type": "object"}:
                known = {k: self.values(v) for k, v in schema.get("properties", {}).items()}
                required = {key: known.pop(key) for key in schema.get("required", ())}
                return st.fixed_dictionaries(required, optional=known)
        assert not schema.keys() - {"title", "default"}, schema
        return JUNK


def resolved(document, reference):
    root, *names = reference.split("/")
    assert root == "#"
    for name in names:
        document = document[name]
    return document


@pytest.fixture(scope="module")
def start(chat_spec):
    pair = load_pair(chat_spec.with_runner(max_length=64))
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield lambda: Api(Engine(pair, BANDIT, slots=3), runner, stack)
        runner.run(stack.aclose())


@pytest.fixture(scope="module")
def api(start):
    return start()


def references(part):
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from references(inner)


def test_every_reference_resolves_and_every_schema_is_one(api):
    found = set(references(api.document))
    assert found
    for reference in found:
        resolved(api.document, reference)
    for schema in api.document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "kind", "least"),
    [
        (COMPLETIONS, "CompletionRequest", {"prompt": "x"}),
        (CHAT, "ChatRequest", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_the_schema_allows_what_is_accepted_and_nothing_else(api, path, kind, least):
    reference = {"$ref": f"#/components/schemas/{kind}"}
    schema = resolved(api.document, reference["$ref"])
    allowed = api.validator(reference)
    known = {name: api.values(own) for name, own in schema["properties"].items()}
    wrong = st.dictionaries(st.sampled_from([*known, "other"]), JUNK, max_size=1)
    seen = set()

    @settings(deadline=None, max_examples=25)
    @example(least, {})
    @example({**least, "stream": True}, {})
    @example(least, {"other": 1})
    @example({**least, "max_completion_tokens": 1}, {"max_tokens": 9})
    @given(api.values(schema), wrong)
    def agree(body: dict[str, Any], other: dict[str, Any]) -> None:
        answer = api.ask("POST", path, json=body | other)
        seen.add((answer.status_code, answer.headers["content-type"]))
        accepted = answer.status_code == 200
        if accepted or answer.json()["error"]["code"] not in BEYOND:
            assert accepted == allowed.is_valid(body | other), answer.text

    agree()
    assert seen >= {
        (200, "application/json"),
        (200, "text/event-stream; charset=utf-8"),
        (400, "application/json"),
    }


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/ready", None, 200),
        ("GET", "/version", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/tiny", None, 200),
        ("GET", "/v1/models/org/other", None, 404),
        ("DELETE", "/v1/models/tiny", None, 405),
        ("GET", COMPLETIONS, None, 405),
        ("POST", COMPLETIONS, b'{"prompt": [3, 4.0], "max_tokens": 2.0}', 200),
        ("POST", COMPLETIONS, b'{"prompt": "' + 60 * b"x" + b'"}', 200),
        ("POST", COMPLETIONS, b"{", 400),
        ("POST", COMPLETIONS, b"[1]", 400),
        ("POST", COMPLETIONS, b"\xff", 400),
        ("POST", COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
        ("POST", COMPLETIONS, b'{"prompt": "x", "model": "other"}', 404),
        ("POST", COMPLETIONS, b" " * (MAX_BODY_BYTES + 1), 413),
        ("POST", CHAT, b'{"messages": []}', 400),
        ("POST", CHAT, b'{"messages": [{"role": "user", "content": ""}], "model": "other"}', 404),
    ],
)
def test_what_is_answered_is_documented(api, method, path, content, status):
    assert api.ask(method, path, content=content).status_code == status


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_answered_when_the_engine_has_failed_is_documented(start, monkeypatch):
    api = start()

    def break_down(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(api.engine, "step", break_down)
    monkeypatch.setattr(EngineProcess, "another", break_down)
    for status in (500, 503):  # the one that was running, and one that comes later
        answer = api.ask("POST", COMPLETIONS, json={"prompt": "x"})
        assert (answer.status_code, "memory" in answer.text) == (status, False)
    assert api.ask("GET", "/health").status_code == 503
    assert api.ask("GET", "/ready").status_code == 503


def test_there_are_no_pages_that_load_scripts_from_elsewhere(api):
    for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
        assert api.run(api.http.get(path)).status_code == 404
