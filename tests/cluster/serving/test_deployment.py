"""A real Ray Serve application answers the openai client, and refuses bad input in its terms."""

import socket
import time
from collections.abc import Iterator

import grpc
import httpx
import openai
import psutil
import pytest
from ray import serve

from cluster.serving import deployment
from cluster.serving.control import TOKEN
from cluster.serving.deployment import (
    application,
    check_cores,
    check_port,
    check_servable,
    deployment_of,
    serving,
)
from cluster.serving.start import Start
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import Pair

CONFIGURATION = Configuration(drafter=DraftModelSettings(policy=FixedSettings(max_tokens=4)))
MODEL = "tiny"
PROMPT = "def main("

http = httpx.Client(timeout=60)  # nothing here is about speed


@pytest.fixture(scope="module")
def url(ray_running: None, tiny_spec: PairSpec) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = Start(deployment_of(tiny_spec, CONFIGURATION), MODEL, Limits(2))
    with serving(start, port=port) as url:
        yield url
    serve.shutdown()  # the next server has a port of its own


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def engine_text(pair: Pair, **options: object) -> str:
    """What the engine alone says to PROMPT."""
    engine = Engine(pair)  # autoregressive: the served configuration is lossless
    request = Request(id="", tokens=engine.encode(PROMPT), **options)
    return engine.generate([request])[0].text


def refused(url: str, status: int = 400, **body: object) -> dict:
    answer = http.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_health_and_models(url, client):
    health = http.get(f"{url}/health").json()
    assert health["ready"]
    assert (health["model"], health["configuration"]) == (MODEL, CONFIGURATION.id)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "specdec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_is_the_engines_text_with_usage_and_counts(client, tiny_pair):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40)
    choice = answer.choices[0]
    assert choice.text == engine_text(tiny_pair, max_new_tokens=40)
    assert choice.finish_reason in ("length", "stop")
    tokens = answer.usage.completion_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    counts = answer.specdec
    assert counts["configuration"] == answer.system_fingerprint == CONFIGURATION.id
    assert counts["lossless"] is True
    assert 0 < counts["accepted"] <= counts["drafted"]
    assert counts["rounds"] / tokens == pytest.approx(counts["verification_rate"])
    assert tokens / counts["rounds"] == pytest.approx(counts["mat"])


def test_streamed_text_is_the_text(client):
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 1, "seed": 7}
    whole = client.completions.create(**options)
    parts = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    *texts, usage = parts
    assert len(texts) > 2
    assert "".join(part.choices[0].text for part in texts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in texts[:-1]] == [None] * (len(texts) - 1)
    assert texts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert texts[-1].specdec == whole.specdec
    assert (usage.choices, usage.usage) == ([], whole.usage)
    assert len({part.id for part in parts}) == 1


def test_stop_strings_end_the_text(client, tiny_pair):
    text = engine_text(tiny_pair, max_new_tokens=40)
    stop = next(text[i : i + 2] for i in range(5, len(text)) if "\ufffd" not in text[i : i + 2])
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "stop": ["never!", stop]}
    answer = client.completions.create(**options)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = "".join(p.choices[0].text for p in client.completions.create(**options, stream=True))
    assert streamed == answer.choices[0].text


def test_prompts_come_as_text_tokens_or_lists_of_them(client, tiny_pair):
    prompts = [PROMPT, "import", "class A:"]
    tokens = [tiny_pair.tokenizer(p)["input_ids"] for p in prompts]
    options = {"model": MODEL, "max_tokens": 12}

    def texts(prompt: object, **more: object) -> list[str]:
        answer = client.completions.create(prompt=prompt, **options, **more)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    expected = [texts(prompt)[0] for prompt in prompts]
    assert texts(prompts) == texts(tokens) == expected
    assert texts(tokens[0]) == expected[:1]
    both = [p + text for p, text in zip(prompts, expected, strict=True)]
    assert texts(prompts, echo=True) == both
    streamed = [""] * 3
    for part in client.completions.create(prompt=prompts, **options, echo=True, stream=True):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == both


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "expected a string"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
        ({"prompt": [1, 99999]}, "prompt", "outside"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"prompt": PROMPT, "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompt": PROMPT, "seed": 2**70}, "seed", "less than"),
        ({"prompt": PROMPT, "stop": [""]}, "stop", "none of them empty"),
        ({"prompt": PROMPT, "stop": list("abcde")}, "stop", "at most 4"),
        ({"prompt": PROMPT, "n": 0}, "n", "from 1 to 32"),
        ({"prompt": [PROMPT] * 5, "n": 32}, "n", "more than 128 choices"),
        ({"prompt": PROMPT, "best_of": 2}, "best_of", "not supported"),
        ({"prompt": PROMPT, "min_tokens": 17}, "min_tokens", "more than max_tokens"),
        ({"prompt": PROMPT, "logit_bias": {"the": 1}}, "logit_bias", "token ids as strings"),
        ({"prompt": PROMPT, "temprature": 1}, "temprature", "unknown key"),
        ({"prompt": PROMPT, "stream_options": {}}, "stream_options", "stream: true"),
    ],
)
def test_bad_input_is_refused_by_name(url, body, param, message):
    error = refused(url, **body)
    assert error["param"] == param
    assert message in error["message"]
    assert param in error["message"] or param == "prompt"


def test_chats_need_a_template(url):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = http.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


def test_nothing_is_between_a_client_and_the_replica_on_one_node(url):
    assert not serve.status().proxies
    answer = http.get(f"{url}/health")
    assert answer.is_success
    assert "server" not in answer.headers


def called(port: int) -> grpc.StatusCode:
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

    def wait_until_cancelled(more_than: int) -> int:
        deadline = time.monotonic() + 60
        while (health := http.get(f"{url}/health").json())["running"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert health["cancelled"] > more_than
        return health["cancelled"]

    with http.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()  # httpx leaves when it is collected
        next(lines)
        health = http.get(f"{url}/health").json()
        assert health["running"] > 0
    cancelled = wait_until_cancelled(more_than=health["cancelled"])
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{url}/v1/completions", json=body, timeout=0.5)
    wait_until_cancelled(more_than=cancelled)


def test_nothing_is_started_for_a_pair_that_cannot_serve(tiny_spec):
    beside = Configuration.model_validate({"drafter": {"kind": "pearl"}})
    with pytest.raises(UserError, match="--cluster"):
        check_servable(tiny_spec, beside)
    check_servable(tiny_spec, beside, Placement())
    with pytest.raises(UserError, match="draft 'other'"):
        check_servable(tiny_spec, Configuration(drafter=DraftModelSettings(draft="other")))
    missing = tiny_spec.model_copy(update={"target": "/no/such/folder"})
    with pytest.raises(UserError, match="/no/such/folder"):
        check_servable(missing, CONFIGURATION)


def test_an_empty_token_in_the_environment_is_none(tiny_spec, monkeypatch):
    monkeypatch.setattr(deployment, "_bound", lambda start, *_: start)
    for token in ("", "secret"):
        monkeypatch.setenv(TOKEN, token)
        start = application(Start(deployment_of(tiny_spec, CONFIGURATION)))
        assert start.operation.token == (token or None)


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(UserError, match="in use"):
            check_port(*server.getsockname())
        with pytest.raises(UserError, match="cannot listen"):
            check_port("no.such.host.invalid", 8000)


def test_cores_that_are_not_there_are_refused():
    check_cores(())
    check_cores((0,))
    for core in (-1, 4096):
        with pytest.raises(UserError, match=rf"--cores {core}: the cores are 0 to"):
            check_cores((0, core))
