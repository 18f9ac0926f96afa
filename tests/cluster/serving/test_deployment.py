"""A deployment serves what one engine writes."""

from dataclasses import replace
from types import SimpleNamespace

import grpc
import httpx
import openai
import psutil
import pytest
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from cluster.serving import control, deployment, engine_process
from cluster.serving.start import Start
from jobs.serve import ENDING
from specdec_core.base.errors import UserError
from specdec_core.config import Placement
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.servers.process import free_port
from tests.commands import wait_until
from tests.configurations import BANDIT, FOUR, drafting

PROMPT = "def main("
OTHER = {"kind": "tree", "draft": "other"}

http = httpx.Client(timeout=120)  # no test is about speed


@pytest.fixture(scope="module")
def url(ray_running, tiny_spec):
    start = Start(deployment.deployment_of(tiny_spec, FOUR), Limits(2))
    with deployment.serving(start, port=free_port()) as url:
        yield url
    serve.shutdown()  # the next server has a port of its own


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_completion_is_the_engines_text_with_usage_and_counts(url, client, tiny_pair):
    health = http.get(f"{url}/health").json()
    assert health["ready"]
    model = tiny_pair.spec.name
    assert (health["model"], health["configuration"]) == (model, FOUR.id)
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 40}
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
        if "ServeReplica:specdec-" in " ".join(process.info["cmdline"] or ())
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
    def check(spec, configuration, placement=None):
        served = deployment.deployment_of(spec, configuration)
        deployment.check_start(Start(served, placement=placement))

    beside = drafting("pearl")
    with pytest.raises(UserError, match="--cluster"):
        check(tiny_spec, beside)
    check(tiny_spec, beside, Placement())
    check(tiny_spec, BANDIT)
    for other in (drafting("draft_model", draft="other"), drafting("bandit", arms=[1, OTHER])):
        with pytest.raises(UserError, match="draft 'other'"):
            check(tiny_spec, other)
    missing = tiny_spec.model_copy(update={"target": "/no/such/folder"})
    with pytest.raises(UserError, match="/no/such/folder"):
        check(missing, FOUR)


def test_the_limits_of_this_librarys_splits_are_not_another_programs(tiny_spec):
    placement = Placement.model_validate({"target": {"devices": 3, "split": "heads"}})
    start = Start(deployment.deployment_of(tiny_spec, FOUR), placement=placement)
    with pytest.raises(UserError, match="cannot be split evenly among 3 devices"):
        deployment.check_start(start)
    deployment.check_start(replace(start, engine="vllm"))


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_replicas_that_the_autoscaler_makes_room_for_are_not_refused(
    ray_running, tiny_spec, monkeypatch, engine
):
    start = Start(deployment.deployment_of(tiny_spec, FOUR), replicas=1000, engine=engine)
    asked: list[tuple[float, float, int]] = []

    def comes(*needs):
        asked.append(needs)
        return len(asked) == 1

    monkeypatch.setattr(deployment, "comes", comes)
    deployment.check_room(start)
    [(cores, _, processes)] = asked
    assert cores * processes == 1000 * tiny_spec.runner.threads
    with pytest.raises(UserError, match="the cluster"):
        deployment.check_room(start)


def test_a_server_whose_answers_take_the_whole_drain_has_the_time_to_end_its_engines(
    ray_running, tiny_spec
):
    bound = deployment._bound(Start(deployment.deployment_of(tiny_spec, FOUR)), drain=7)
    closing = bound._bound_deployment._deployment_config.graceful_shutdown_timeout_s - 7
    # Ray Serve kills it then. An engine's process may have to be killed, after a wait.
    assert closing > 2 * engine_process._ENDING
    assert closing + control._STOPPING < ENDING  # of the command


@pytest.mark.parametrize("error", [ActorDiedError(), RayServeException("it was shut down")])
@pytest.mark.parametrize("step", ["start", "run"])
def test_a_server_whose_ray_serve_another_one_ends_is_one_line(
    ray_running, bare_home, tiny_spec, monkeypatch, step, error
):
    def ended(*_, **__):
        raise error

    for name in ("start", "run"):
        monkeypatch.setattr(serve, name, ended if name == step else lambda *_, **__: None)
    monkeypatch.setattr(serve, "delete", ended)
    start = Start(deployment.deployment_of(tiny_spec, FOUR))
    with (
        pytest.raises(UserError, match="did not start: Ray Serve was ended meanwhile"),
        deployment.serving(start, port=free_port()),
    ):
        pass


def test_a_proxy_is_started_at_another_address_once_a_server_that_is_ending_has_left(monkeypatch):
    ending = {"specdec-8001": {"status": ApplicationStatus.DELETING, "route_prefix": "/"}}
    looks, steps = iter([ending, ending, {}]), []

    def details():
        return {"applications": next(looks), "proxies": {"node": {}}}

    client = SimpleNamespace(get_serve_details=details)
    monkeypatch.setattr(deployment, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(serve, "shutdown", lambda: steps.append("shutdown"))
    monkeypatch.setattr(serve, "start", lambda **_: steps.append("start"))
    deployment.start_serve(HTTPOptions(port=free_port()))
    assert steps == ["shutdown", "start"]


def test_nodes_that_are_added_for_a_server_count_where_it_listens(
    ray_running, tiny_spec, monkeypatch
):
    nodes, listening = ["head"], []
    monkeypatch.setattr(deployment, "alive_nodes", lambda: nodes)
    monkeypatch.setattr(deployment, "check_room", lambda _: nodes.append("added"))

    def start_serve(options):
        listening.append(options)
        raise UserError("nothing is started here")

    monkeypatch.setattr(deployment, "start_serve", start_serve)
    start, port = Start(deployment.deployment_of(tiny_spec, FOUR)), free_port()
    with (
        pytest.raises(UserError, match="nothing is started here"),
        deployment.serving(start, port=port),
    ):
        pass
    assert [options.port for options in listening] == [port]


def test_a_server_that_the_cluster_has_at_the_port_is_not_replaced(
    ray_running, bare_home, tiny_spec, monkeypatch
):
    port = free_port()
    running = SimpleNamespace(status=ApplicationStatus.RUNNING)
    there = SimpleNamespace(applications={f"specdec-{port}": running})
    monkeypatch.setattr(deployment.serve, "status", lambda: there)
    start = Start(deployment.deployment_of(tiny_spec, FOUR))
    with (
        pytest.raises(UserError, match=f"--port {port}: the cluster has a server"),
        deployment.serving(start, port=port),
    ):
        pass


@pytest.mark.parametrize("leaves", [True, False])
def test_a_server_that_is_ending_at_the_port_is_waited_for(
    ray_running, bare_home, tiny_spec, monkeypatch, leaves
):
    port, told = free_port(), []
    ending = {f"specdec-{port}": SimpleNamespace(status=ApplicationStatus.DELETING)}
    seen = [ending, ending, {}] if leaves else [ending] * 3
    looks = iter(seen)

    def status():
        return SimpleNamespace(applications=next(looks, seen[-1]))

    def check_room(_):
        raise UserError("nothing is started here")

    monkeypatch.setattr(deployment.serve, "status", status)
    monkeypatch.setattr(deployment, "check_room", check_room)
    monkeypatch.setattr(deployment, "_LEAVING", 60.0 if leaves else 0.15)
    start = Start(deployment.deployment_of(tiny_spec, FOUR))
    expected = "nothing is started here" if leaves else f"--port {port}: the cluster has a server"
    with (
        pytest.raises(UserError, match=expected),
        deployment.serving(start, port=port, tell=told.append),
    ):
        pass
    [line] = told
    assert f"--port {port}: waiting for the server there to end" in line
