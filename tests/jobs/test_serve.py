"""`specdec serve`, and what follows a running server: deployed champions, changed traffic."""

import hashlib
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
import ray
import ray.serve
import yaml
from mlflow.exceptions import MlflowException
from ray.serve.config import HTTPOptions

from cluster.serving import control, deployment, drift
from cluster.serving.control import Refusal, RunningServer, announced, find_server
from cluster.serving.deployment import deployment_of
from cluster.serving.http.access import Access, read_keys
from cluster.serving.served import Deployment, Operation
from cluster.serving.start import Start
from dashboards.tracking import registry
from jobs import deploy, serve, traffic
from jobs.choice import choose
from jobs.serve_keys import main as make_key
from jobs.traffic import SIGNAL, read_command, watched
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.trained import weights_here
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.servers.process import free_port, running
from tests.commands import ROOT, config_file, wait_until
from tests.configurations import CHAIN, LOOKUP, SUFFIX
from tests.dashboards.tracking.test_registry import certificate_of
from tests.local_server import server_of, service_of
from tests.registered import appointed

pytestmark = pytest.mark.usefixtures("ray_running")


@pytest.fixture
def config(tiny_spec, tmp_path):
    return config_file(tmp_path, tiny_spec, {"kind": "draft_model"})


@pytest.fixture
def refused(command, tmp_path):
    """Run the command; returns the one line that it ends with."""

    def refuse(*arguments):
        done = command(serve.main, tmp_path / "home", *arguments)
        assert (done.returncode, done.stdout.strip()) == (2, "")
        [line] = done.stderr.splitlines()
        return line

    return refuse


def beside(folder, spec):
    """A configuration whose draft drafts beside the target."""
    return config_file(folder, spec, {"kind": "pearl"})


def rayservice(config, **more):
    """What KubeRay's manifest says of its application, and this built with the arguments there, a
    configuration, a placement and no keys; `more` replaces arguments."""
    manifest = yaml.safe_load((ROOT / "cluster" / "kuberay" / "ray-service.yaml").read_text())
    (described,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    files = {"config": str(config), "cluster": str(ROOT / "cluster" / "local-2.yaml")}
    access = {"api_key_file": None, "no_auth": True}
    return described, serve.application({**described["args"], **files, **access, **more})


def test_the_rayservices_application_is_built_from_its_arguments(tiny_spec, tmp_path, monkeypatch):
    config = beside(tmp_path, tiny_spec)
    monkeypatch.setattr(deployment, "application", lambda start: start)
    described, start = rayservice(config)
    arguments = described["args"]
    assert (start.deployment.pair, start.limits.slots) == (tiny_spec, arguments["slots"])
    assert start.queue == 128
    assert start.deployment.configuration.asynchronous
    assert (start.placement.draft.devices, start.placement.target.devices) == (1, 1)
    assert start.replicas == 2
    assert rayservice(config, max_length=64)[1].deployment.pair.runner.max_length == 64
    with pytest.raises(UserError, match="give `api_key_file`, a file of `specdec serve keys`, or"):
        rayservice(config, no_auth=False)
    missing = config.with_name("keys")
    with pytest.raises(UserError, match=f"{missing}: no such file"):
        rayservice(config, no_auth=False, api_key_file=str(missing))
    with pytest.raises(UserError, match="args: slot: "):
        serve.application({"slot": 4})


@pytest.mark.long
def test_the_rayservices_application_serves_a_draft_beside_the_target(tiny_pair, tmp_path):
    # The second replica that the manifest asks for would wait for devices that are not here.
    described, built = rayservice(beside(tmp_path, tiny_pair.spec), replicas=1)
    port = free_port()
    try:
        ray.serve.start(proxy_location="HeadOnly", http_options={"port": port})
        ray.serve.run(built, name=described["name"], route_prefix=described["route_prefix"])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        (model,) = (model.id for model in client.models.list())
        answers = [
            client.completions.create(model=model, prompt=prompt, max_tokens=60)
            for prompt in ("def main(", "import", "def main(")
        ]
        engine = Engine(tiny_pair)
        for answer, prompt in zip(answers, ("def main(", "import", "def main("), strict=True):
            (expected,) = engine.generate([Request("", engine.encode(prompt), 60)])
            assert answer.choices[0].text == expected.text
    finally:
        ray.serve.shutdown()


def test_ray_serves_proxy_listens_where_the_server_is_started_and_for_it_alone():
    """Ray Serve itself keeps the address that it was started with."""

    @ray.serve.deployment(ray_actor_options={"num_cpus": 0})
    class Earlier:
        def __call__(self):
            return "earlier"

    first, second = (HTTPOptions(host="127.0.0.1", port=free_port()) for _ in range(2))
    try:
        deployment.start_serve(first)
        ray.serve.run(Earlier.bind(), name="earlier", route_prefix="/")
        for taken in (first, second):
            with pytest.raises(UserError, match=r"stop what the cluster has now: earlier"):
                deployment.start_serve(taken)
        ray.serve.delete("earlier")
        deployment.start_serve(second)
        assert httpx.get(f"http://127.0.0.1:{second.port}/-/routes", trust_env=False).status_code
    finally:
        ray.serve.shutdown()


@pytest.mark.long
def test_weights_that_cannot_be_loaded_are_one_line(config, refused, tmp_path):
    """Only the replica finds out."""
    content = yaml.safe_load(config.read_text())
    broken = tmp_path / "broken"
    shutil.copytree(content["pair"]["target"], broken)
    (broken / "model.safetensors").write_bytes(b"cut off")
    content["pair"]["target"] = str(broken)
    config.write_text(yaml.safe_dump(content))
    line = refused("--config", config, "--port", free_port())
    assert "header" in line
    assert ray.is_initialized()  # it was there before
    ray.serve.shutdown()


def test_a_port_in_use_is_one_line(config, refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = refused("--config", config, "--port", port)
    assert line == f"error: cannot listen on 127.0.0.1:{port}: address already in use"


def test_replicas_that_cannot_be_are_one_line(config, refused):
    line = refused("--config", config, "--replicas", 1000, "--port", free_port())
    assert line.startswith("error: --replicas 1000: the cluster has room for ")


def test_the_request_to_try_is_a_chat_where_there_is_a_template(chat_spec, tiny_spec, capsys):
    url = "http://127.0.0.1:8000"
    for spec, keys, path in (
        (chat_spec, (), "/v1/chat/completions"),
        (tiny_spec, None, "/v1/completions"),
    ):
        served = Deployment(pair=spec, configuration=AUTOREGRESSIVE, source="a file")
        serve._announce(url, Start(served, access=Access(keys)))
        printed = capsys.readouterr().out
        assert f"curl -N {url}{path} " in printed
        assert ("Authorization: Bearer $KEY" in printed) == (keys is not None)


def test_ranges_of_load_beyond_the_slots_are_said(tiny_spec, capsys):
    ranges = {1: {"kind": "draft_model"}, 3: {"kind": "prompt_lookup"}, 5: None, 9: 2}
    configuration = Configuration(drafter={"kind": "schedule", "ranges": ranges})
    served = Deployment(pair=tiny_spec, configuration=configuration, source="a file")
    for slots, said in ((4, True), (8, True), (9, False)):
        serve._announce("http://127.0.0.1:8000", Start(served, limits=Limits(slots)))
        assert ("warning" in (printed := capsys.readouterr().out)) == said
        assert (f"--slots {slots}: what drafts from" in printed) == said
        assert ("from 5 and 9 requests on never does; --slots 9" in printed) == (slots == 4)


def test_the_file_has_the_hashes_of_the_keys_that_were_shown(tmp_path, capsys):
    path = tmp_path / "keys"
    for name in ("anne", ""):
        make_key(path, name)
    keys = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sk-")]
    assert len(set(keys)) == 2
    assert read_keys(path) == tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    assert " anne\n" in path.read_text()
    assert not any(key in path.read_text() for key in keys)


def test_keys_that_are_made_at_a_time_are_all_in_the_file(tmp_path):
    path = tmp_path / "keys"
    with ThreadPoolExecutor(8) as makers:
        list(makers.map(lambda name: make_key(path, name), "abcdefgh"))
    assert len(read_keys(path)) == 8


OPERATION = Operation("a secret")


@pytest.fixture
def url(home, tiny_pair):
    """A server of this workspace that refuses every deployment, and says so."""
    service = service_of(Engine(tiny_pair, AUTOREGRESSIVE), operation=OPERATION)
    service.engine.host.exclusive = True
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


def follow(monkeypatch, spec, server, version, looks):
    """Follow a registry in which the looks find champions of these versions, or errors, in turn."""
    found = iter(looks)

    def look(_):
        champion = next(found, KeyboardInterrupt())
        if isinstance(champion, BaseException):
            raise champion
        return champion

    champion = Deployment(pair=spec, configuration=LOOKUP, version=looks[-1], certificate="sure")
    monkeypatch.setattr(deploy, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(control, "find_server", lambda _: server)
    monkeypatch.setattr(registry, "champion_version", look)
    monkeypatch.setattr(deploy, "_registered", lambda *_: champion)
    with pytest.raises(KeyboardInterrupt):
        deploy.follow_champion("here", version, 1)


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
    server = Server(*errors)
    follow(monkeypatch, tiny_spec, server, version=1, looks=[2] * 5)
    assert server.asked == asked


AWAY = MlflowException("the registry does not answer")


@pytest.mark.parametrize(
    ("looks", "asked"),
    [([4, 4], 0), ([AWAY, 4, 4], 0), ([AWAY, 4, AWAY, 5, 5], 1), ([None, 5], 1)],
    ids=str,
)
def test_a_server_of_a_file_waits_for_another_champion_than_the_first_that_is_found(
    looks, asked, tiny_spec, monkeypatch
):
    server = Server()
    follow(monkeypatch, tiny_spec, server, version=None, looks=looks)
    assert server.asked == asked


def test_a_server_that_follows_starts_while_the_registry_does_not_answer(
    config, refused, monkeypatch
):
    def away(*_):
        raise AWAY

    def serving(*_, **__):
        raise UserError("it starts")

    monkeypatch.setattr(registry, "champion_version", away)
    monkeypatch.setattr(deployment, "serving", serving)
    assert refused("--config", config, "--follow", 60) == "error: it starts"


def test_a_canary_whose_server_is_started_again_is_one_line(tiny_pair, monkeypatch):
    service = service_of(Engine(tiny_pair, CHAIN), operation=OPERATION)

    def sleep(_):
        service.fleet.canary = None  # as in a server that Ray Serve has started again

    monkeypatch.setattr(deploy, "time", SimpleNamespace(sleep=sleep))
    wanted = Deployment(pair=tiny_pair.spec, configuration=LOOKUP)
    with running(server_of(service)) as url:
        server = RunningServer(url=url, token=OPERATION.token)
        with pytest.raises(UserError, match="was started again, and has no canary"):
            deploy._try_out(server, wanted, 0.5)


def test_what_is_deployed_says_of_which_weights_it_is_and_its_certificate_but_no_folder(
    home, tiny_spec
):
    made = deployment_of(tiny_spec, LOOKUP, "/etc/specdec/config.yaml")
    assert (made.public["source"], made.public["certified"]) == ("config.yaml", False)
    assert made.model_copy(update={"certificate": "sure"}).public["certified"]
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
        (lambda: None, ""),
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
    assert choose(None, "vllm")[0].configuration == SUFFIX
    assert choose(None)[0].configuration == LOOKUP


def test_what_is_missing_is_certified_where_it_is_served(home, swept):
    with pytest.raises(UserError, match=f"certify --config {SUFFIX.id} --engine vllm` writes one"):
        deploy.main(promote=SUFFIX.id, engine="vllm", uncertified=False)
    with pytest.raises(UserError, match="--engine goes with --promote"):
        deploy.main(engine="vllm")


def test_the_named_command_certifies_the_challenger_or_version_that_lacks_a_certificate(
    home, url, tiny_spec
):
    appointed(tiny_spec, LOOKUP)
    registry.appoint(tiny_spec.name, 1, "challenger")
    for asked in ({"which": "challenger"}, {"version": 1}):
        with pytest.raises(UserError, match=f"certify --config {LOOKUP.id}` writes one"):
            deploy.main(url=url, **asked)
    with pytest.raises(UserError, match="certify` writes one"):  # of the champion
        deploy.main(url=url)


def test_the_command_that_certifies_a_file_can_be_pasted_into_a_shell():
    words = shlex.split(deploy.certify_command("vllm", "my file.yaml"))
    assert words[1:] == ["certify", "--config", "my file.yaml", "--engine", "vllm"]


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
    monkeypatch.setattr(traffic, "LOOK", 0.2)
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
    with watched(server, command, said.append):
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


def test_what_is_raised_while_a_command_runs_starts_it_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "LOOK", 0.05)
    told, go = tmp_path / "told", tmp_path / "go"
    told.touch()
    raised: list[dict[str, str]] = []
    script = (
        f"echo ${SIGNAL} >> {shlex.quote(str(told))};"
        f" until [ -e {shlex.quote(str(go))} ]; do sleep 0.05; done"
    )
    command = read_command(shlex.join(["sh", "-c", script]))
    looks = []

    def health():
        looks.append(len(raised))
        return {"drift": [*raised]}

    with watched(SimpleNamespace(health=health), command, lambda line: None):
        for signal in ("first", "second"):
            wait_until(lambda: len(looks) > 2, 60)
            raised.append({"signal": signal})
            wait_until(lambda: "first" in told.read_text(), 60)
            looks.clear()
        go.touch()
        wait_until(lambda: told.read_text().split() == ["first", "second"], 60)


def test_a_command_that_is_none_is_one_line():
    assert read_command(None) == ()
    for text in ("", "no-such-program --x", "echo 'a"):
        with pytest.raises(UserError, match="--on-drift"):
            read_command(text)
