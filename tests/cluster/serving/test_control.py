"""Who has a server's token may replace what it serves, and nobody else."""

import os
from socket import gethostname

import httpx
import pytest
from starlette.responses import HTMLResponse, RedirectResponse

from cluster.serving import control
from cluster.serving.control import (
    Refusal,
    RunningServer,
    announced,
    find_server,
    new_operation,
    url_of,
)
from cluster.serving.engine_loop import EngineFailed
from cluster.serving.fleet import Fleet
from cluster.serving.http.access import OPERATE
from cluster.serving.served import NOT_OPERATED, Deployment, Operation
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.drafting.trained import weights_here
from specdec_core.engine import Engine
from specdec_core.servers.process import running
from tests.cluster.serving.http.events import client_of
from tests.commands import wait_until
from tests.configurations import LOOKUP
from tests.local_server import LocalServer, server_of, service_of

TOKEN = "a secret"
OPERATION = Operation(TOKEN)


@pytest.fixture
def url(tiny_pair):
    """A server that refuses every deployment, as one on placed devices does."""
    service = service_of(Engine(tiny_pair, AUTOREGRESSIVE), operation=OPERATION)
    service.engine.host.exclusive = True
    with running(server_of(service)) as url:
        yield url


def test_a_running_server_is_found_by_its_user_alone(bare_home, tiny_spec):
    with pytest.raises(UserError, match="no server of this workspace"):
        find_server()
    with announced("http://0.0.0.0:8123", tiny_spec, OPERATION):
        [file] = (bare_home / "servers").iterdir()
        assert file.stat().st_mode & 0o077 == 0
        server = find_server()
        assert (server.url, server.token) == ("http://127.0.0.1:8123", TOKEN)
        assert server.name == tiny_spec.name
        with pytest.raises(UserError, match="no server answers there"):
            server.health()
        with announced("http://127.0.0.1:8124", tiny_spec, OPERATION):
            with pytest.raises(UserError, match="several servers"):
                find_server()
            assert find_server("http://127.0.0.1:8124/").url.endswith("8124")
            # A server that stops may have removed its file since the folder was read.
            removed = bare_home / "servers" / f"8125@{gethostname()}.json"
            removed.symlink_to("removed")
            assert find_server("http://127.0.0.1:8124").url.endswith("8124")
            removed.unlink()
    assert not list((bare_home / "servers").iterdir())


@pytest.mark.parametrize(
    ("host", "here"),
    [("::1", "[::1]"), ("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("my-host", "my-host")],
)
def test_a_server_is_found_at_any_address(bare_home, tiny_spec, host, here):
    url = url_of(host, 8123)
    with announced(url, tiny_spec, OPERATION):
        assert find_server(url).url == f"http://{here}:8123"
    assert url_of("::1", 8123, encrypted=True) == "https://[::1]:8123"


def test_a_server_here_is_found_by_this_machines_name(bare_home, tiny_spec, monkeypatch):
    monkeypatch.setenv("SPECDEC_DEPLOY_TOKEN", "another machine's")
    with announced("http://127.0.0.1:8123", tiny_spec, OPERATION):
        assert find_server("http://localhost:8123").token == OPERATION.token
    assert find_server("http://localhost:8123").token == "another machine's"


def test_servers_on_the_schemes_own_ports_are_told_apart(bare_home, tiny_spec):
    with (
        announced("http://127.0.0.1:80", tiny_spec, OPERATION),
        announced("https://127.0.0.1:443", tiny_spec, OPERATION),
    ):
        assert find_server("http://127.0.0.1:80").url == find_server("http://127.0.0.1").url
        assert find_server("https://127.0.0.1:443").url == "https://127.0.0.1"


def test_servers_of_other_machines_with_this_workspace_are_left_alone(
    bare_home, tiny_spec, monkeypatch
):
    url = "http://127.0.0.1:8123"
    with announced(url, tiny_spec, OPERATION):
        with monkeypatch.context() as patch:
            patch.setattr(control, "gethostname", lambda: "another")
            with pytest.raises(UserError, match="no server of this workspace"):
                find_server()
            with announced(url, tiny_spec, Operation("another's")):
                assert find_server(url).token == "another's"
        assert find_server(url).token == TOKEN


def test_a_server_does_not_serve_what_another_run_has_deployed(bare_home, tiny_spec):
    deployment = Deployment(pair=tiny_spec, configuration=LOOKUP)
    first = new_operation(8123)
    first.keep(deployment)
    assert new_operation(8123).last() is None
    assert first.last() == deployment  # it may still run


def test_what_killed_servers_of_a_port_have_deployed_is_removed_after_days(
    bare_home, tiny_spec, monkeypatch
):
    def deployed(port=8123):
        operation = new_operation(port)
        operation.keep(Deployment(pair=tiny_spec, configuration=LOOKUP))
        return operation.deployed

    old, fresh, of_another_port = deployed(), deployed(), deployed(812)
    with monkeypatch.context() as patch:
        patch.setattr(control, "gethostname", lambda: "another")
        of_another_machine = deployed()  # whose servers may run
    for file in (old, of_another_port, of_another_machine):
        os.utime(file, (0, 0))
    new_operation(8123)
    assert not old.exists()
    assert all(file.exists() for file in (fresh, of_another_port, of_another_machine))


@pytest.mark.parametrize("url", ["http://[::1", "http://here:port"])
def test_what_is_no_url_is_one_line(bare_home, url):
    with pytest.raises(UserError, match="no URL of a server"):
        find_server(url)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HTMLResponse("<p>hello"), "another program answers there"),
        (RedirectResponse("/login"), "status 307"),
    ],
)
def test_what_another_program_answers_is_one_line(bare_home, monkeypatch, answer, said):
    monkeypatch.setenv(control.TOKEN, TOKEN)
    with running(LocalServer(lambda: answer)) as url:
        server = find_server(url)
        for order in (server.health, server.roll_back):
            with pytest.raises(UserError, match=said):
                order()


def test_it_takes_orders_with_its_token_and_says_why_it_refuses_one(bare_home, url, tiny_spec):
    deployment = Deployment(pair=tiny_spec, configuration=LOOKUP)
    with announced(url, tiny_spec, OPERATION):
        with pytest.raises(UserError, match="nothing else was served before"):
            find_server().roll_back()
        with pytest.raises(UserError, match="is not replaced while it serves"):
            find_server().deploy(deployment)
        assert find_server().health()["switches"] == 0
    for token in ("", "wrong"):
        for path in ("deploy", "rollback"):
            headers = {"x-specdec-token": token}
            answer = httpx.post(f"{url}/v1/specdec/{path}", headers=headers, content="{}")
            assert answer.status_code == 403
            answer = httpx.post(f"{url}/v1/specdec/{path}?canary=abc", headers=headers)
            assert answer.status_code == 403
    headers = {"x-specdec-token": TOKEN}
    answer = httpx.post(f"{url}/v1/specdec/deploy?canary=abc", headers=headers, content="{}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "canary"
    answer = httpx.post(f"{url}/v1/specdec/deploy", headers=headers, content='{"pear": {}}')
    assert answer.status_code == 400
    assert "pear: unknown key" in answer.json()["error"]["message"]


def test_what_fails_for_now_is_told_from_a_refusal(bare_home, url, tiny_spec, monkeypatch):
    deployment = Deployment(pair=tiny_spec, configuration=LOOKUP)

    async def fails(*_):
        raise EngineFailed("no engine works")

    taken: list[Deployment] = []

    async def served(_, wanted):
        taken.append(wanted)
        return wanted

    with announced(url, tiny_spec, OPERATION):
        server = find_server()
        with pytest.raises(Refusal, match="is not replaced while it serves"):
            server.deploy(deployment)
        with monkeypatch.context() as patch:
            patch.setattr(Fleet, "deploy", fails)
            patch.setattr(Fleet, "roll_back", fails)
            for ask in (lambda: server.deploy(deployment), server.roll_back):
                with pytest.raises(UserError, match="no engine works") as error:
                    ask()
                assert not isinstance(error.value, Refusal)
        monkeypatch.setattr(Fleet, "deploy", served)
        sure = deployment.model_copy(update={"certificate": "sure"})
        assert server.deploy(sure) == sure.as_here()
        elsewhere = sure.model_copy(update={"weights": {"target": "t", "draft": "d"}})
        assert server.deploy(elsewhere) == deployment.as_here()
    here = weights_here(tiny_spec, [LOOKUP])
    assert [each.weights for each in taken] == [here, here]


class LongAnswer:
    """What a server knows of a request that it answers."""

    ends: float | None = None

    def reschedule(self, at):
        self.ends = at


def test_a_stop_does_not_wait_for_long_answers(tiny_pair, monkeypatch):
    """`ray job stop` would kill the command before it has told Ray Serve that the server ends."""
    monkeypatch.setattr(control, "_STOPPING", 0.2)
    service = service_of(Engine(tiny_pair, AUTOREGRESSIVE), operation=OPERATION)
    answer = LongAnswer()
    service.stopping.running.add(answer)
    with running(server_of(service)) as url:
        with pytest.raises(UserError, match="no server answers there"):
            RunningServer(url=url, token=TOKEN).stop(1000)
        wait_until(lambda: answer.ends)
        assert answer.ends == service.stopping.until  # it has its time all the same
        service.stopping.running.clear()


@pytest.mark.parametrize("operation", [NOT_OPERATED, Operation("")])
async def test_a_server_without_a_token_takes_no_orders(tiny_pair, operation):
    service = service_of(Engine(tiny_pair, AUTOREGRESSIVE), operation=operation)
    async with client_of(service) as http:
        for path in OPERATE:
            answer = await http.post(path, headers={"x-specdec-token": ""}, content="{}")
            assert answer.status_code == 404
