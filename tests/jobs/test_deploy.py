"""What follows a running server: champions that are deployed, and commands for changed traffic."""

import shlex
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

from cluster.serving import control, drift
from cluster.serving.control import Refusal, RunningServer, announced, find_server
from cluster.serving.deployment import deployment_of
from cluster.serving.http.access import Access
from cluster.serving.served import Deployment, Operation
from dashboards.tracking import registry
from jobs import deploy
from jobs.choice import choose_version
from jobs.traffic import SIGNAL, read_command, watched
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.drafting.trained import weights_here
from specdec_core.engine import Engine
from specdec_core.servers.process import running
from tests.commands import wait_until
from tests.configurations import CHAIN, LOOKUP, SUFFIX
from tests.dashboards.tracking.test_registry import certificate_of
from tests.local_server import server_of, service_of
from tests.registered import appointed

OPERATION = Operation("a secret")


@pytest.fixture
def url(home, tiny_pair):
    """A server of this workspace that refuses every deployment, and says so."""
    service = service_of(Engine(tiny_pair, AUTOREGRESSIVE), operation=OPERATION)
    with running(server_of(service)) as url, announced(url, tiny_pair.spec, OPERATION):
        yield url


class Server:
    """Answers deployments with these errors in turn, and then takes what comes."""

    name, url, program = "tiny", "here", None

    def __init__(self, *errors):
        self.errors, self.asked = list(errors), 0

    def health(self):
        return {"version": 1}

    def deploy(self, deployment):
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return deployment


@pytest.mark.parametrize(
    ("errors", "asked"),
    [
        ([UserError("no server answers there"), UserError("no replica answers")], 3),
        ([Refusal("another target")], 1),
    ],
)
def test_a_champion_is_given_up_only_where_the_server_refuses_it(
    errors, asked, tiny_spec, monkeypatch
):
    server, looks = Server(*errors), iter(range(5))
    champion = Deployment(pair=tiny_spec, configuration=LOOKUP, version=2, certificate="sure")

    def sleep(_):
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(deploy, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(control, "find_server", lambda _: server)
    monkeypatch.setattr(registry, "champion_version", lambda _: 2)
    monkeypatch.setattr(deploy, "_registered", lambda *_: champion)
    with pytest.raises(KeyboardInterrupt):
        deploy.follow_champion("here", 1, 1)
    assert server.asked == asked


def test_what_is_deployed_says_of_which_weights_it_is(home, tiny_spec):
    made = deployment_of(tiny_spec, LOOKUP)
    assert made.weights == weights_here(tiny_spec, [LOOKUP])
    elsewhere = tiny_spec.model_copy(update={"target": "not/here"})
    assert deployment_of(elsewhere, LOOKUP).weights is None


def test_following_outlives_the_registry_and_says_once_what_is_in_the_way(
    home, url, tiny_spec, monkeypatch, capsys
):
    artifacts, away = home / "mlartifacts", home / "away"

    def certified():
        away.rename(artifacts)
        certificate_of(tiny_spec, LOOKUP).save()

    story: list[tuple[Callable[[], object], str]] = [  # before a look, and what that has to say
        (lambda: appointed(tiny_spec, LOOKUP), "no certificate"),
        (lambda: None, ""),
        (lambda: artifacts.rename(away), "champion.yaml"),
        (lambda: None, ""),
        (certified, "not replaced while it serves"),
        (lambda: artifacts.rename(away), ""),  # nothing is read of a champion that is known
    ]
    said: list[str] = []

    def sleep(_):
        said.append(capsys.readouterr().out)
        if len(said) > len(story):
            raise KeyboardInterrupt
        story[len(said) - 1][0]()

    monkeypatch.setattr(deploy, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(KeyboardInterrupt):
        deploy.follow_champion(url, None, 1)
    for found, (_, expected) in zip(said[1:], story, strict=True):
        assert expected in found
        assert bool(found) == bool(expected), found


def test_a_server_of_another_program_follows_its_own_champion(home, url, tiny_spec):
    """The same pair has a champion in this library's engine."""
    own, server = find_server(url), find_server(url).model_copy(update={"engine": "vllm"})
    appointed(tiny_spec, LOOKUP)
    with pytest.raises(UserError, match=f"no champion of {tiny_spec.name}-vllm"):
        deploy._registered(server, "champion")
    appointed(tiny_spec, SUFFIX, "vllm")
    assert deploy._registered(server, "champion").configuration == SUFFIX
    assert deploy._registered(own, "champion").configuration == LOOKUP
    assert choose_version(None, "vllm")[0].configuration == SUFFIX
    assert choose_version(None)[0].configuration == LOOKUP


def test_what_is_missing_is_certified_where_it_is_served(home, swept):
    with pytest.raises(UserError, match=f"certify --config {SUFFIX.id} --engine vllm` writes one"):
        deploy.main(promote=SUFFIX.id, engine="vllm", uncertified=False)
    with pytest.raises(UserError, match="--engine goes with --promote"):
        deploy.main(engine="vllm")


TRAFFIC_OPERATION = Operation("a secret")
KEYS = Access(keys=(b"nobody's hash",)).admitting(TRAFFIC_OPERATION.token)


@pytest.fixture
def server(tiny_pair):
    """One that asks for keys, of which the operator's token is one."""
    service = service_of(Engine(tiny_pair, CHAIN), operation=TRAFFIC_OPERATION, access=KEYS)
    with running(server_of(service)) as url:
        yield RunningServer(url=url, token="a secret", pair=tiny_pair.spec)


def ask(server, tokens, prompt="def main("):
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {server.token}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_changed_traffic_is_said_and_starts_the_command(server, tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "SECONDS", 0.0)
    monkeypatch.setattr(drift, "REQUESTS", 1)
    monkeypatch.setattr(drift, "WEEK", 1e-6)  # each mean may bring the most of false alarms
    said: list[str] = []
    script = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ[sys.argv[2]])"
    )
    told = tmp_path / "told"
    words = [sys.executable, "-c", script, str(told), SIGNAL]
    command = read_command(shlex.join(words))
    with watched(server, command, said.append, 0.2):
        time.sleep(0.3)  # it has looked
        for prompt in [*["import"] * 15, *["import " * 30] * 60]:
            ask(server, 1, prompt)
            if server.health()["drift"]:
                break
        wait_until(lambda: told.exists() and told.read_text(), 60)
    assert told.read_text() == "prompt_tokens"
    [line] = said
    assert line.startswith("the traffic has changed (prompt_tokens): ")
    [alarm] = server.health()["drift"]
    assert alarm["signal"] == "prompt_tokens"
    headers = {"authorization": f"Bearer {server.token}"}
    page = httpx.get(f"{server.url}/metrics", headers=headers).text
    assert 'specdec:drift_alarms_total{model_name="tiny",signal="prompt_tokens"} 1.0' in page


def test_a_command_that_is_none_is_one_line():
    assert read_command(None) == ()
    for text in ("", "no-such-program --x", "echo 'a"):
        with pytest.raises(UserError, match="--on-drift"):
            read_command(text)
