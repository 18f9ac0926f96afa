"""Operating a running server.

A server leaves its address and a token in the workspace, in a file that only its user can read. The
token permits to replace what is served, and to stop the server. Machines may share a workspace, and
each knows its own servers alone: 127.0.0.1 is another server's address elsewhere.
"""

from __future__ import annotations

import os
import secrets
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from time import time
from typing import Any

import httpx

from cluster.serving.http.routes.deploy import DEPLOY, ROLL_BACK, STOP, TOKEN_HEADER
from cluster.serving.served import Deployment, Operation
from cluster.serving.tls import own_certificate, trusting
from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec, Value, parse, parse_json
from specdec_core.servers.completions import refusal

TOKEN = "SPECDEC_DEPLOY_TOKEN"  # the token of a server of a Serve config file
_PORTS = {"http": 80, "https": 443}  # that an address may leave out
_TIMEOUT = 1800.0  # seconds: a new engine may compile its models
_KEPT = 7 * 86400.0  # seconds until a file of what was deployed is taken for a killed server's
_STOPPING = 1.0  # seconds until a server that stops is left to finish its requests


class Refusal(UserError):
    """A server refuses an order; it would refuse it again."""


class RunningServer(Value):
    """How to reach a server, and the pair that it was started with."""

    url: str
    token: str
    pair: PairSpec | None = None
    certificate: str | None = None  # the server's, if it encrypts; its file may be renewed
    engine: str | None = None  # the other program that answers, if one does

    @property
    def name(self) -> str:
        """The pair's name in the registry. Raises :class:`UserError` where it is unknown."""
        if self.pair is None:
            raise UserError(f"{self.url}: its pair is not known here; name a file with --config")
        return self.pair.name

    @property
    def program(self) -> str | None:
        """The other program that answers, if one does. A server that another machine has started
        says so itself. Raises :class:`UserError` where it does not answer."""
        return self.engine if self.pair is not None else self.health().get("engine")

    def deploy(self, deployment: Deployment, canary: float | None = None) -> Deployment:
        """Have it serve this from now on, or give this the share `canary` of the traffic. Raises
        :class:`Refusal` where it refuses, and any other :class:`UserError` where it does not
        answer; then it serves what it did before."""
        path = DEPLOY if canary is None else f"{DEPLOY}?canary={canary}"
        return self._post(path, deployment.model_dump_json())

    def roll_back(self) -> Deployment:
        """Have it serve what it served before. Raises :class:`UserError`."""
        return self._post(ROLL_BACK, "")

    def stop(self, drain: float) -> None:
        """Have it take no more requests, and break off the running ones after `drain` seconds.
        Raises :class:`UserError` where it does not answer, also where some still run after a
        second: `ray job stop` leaves its command three, in which that ends the server, too."""
        self._answer("POST", f"{STOP}?drain={drain}", timeout=_STOPPING)

    def health(self) -> dict[str, Any]:
        """Its `/health`."""
        return parse(dict[str, Any], self._content("GET", "/health"), self.url)

    def _post(self, path: str, body: str) -> Deployment:
        return parse(Deployment, self._content("POST", path, body), self.url)

    def _content(self, method: str, path: str, body: str = "") -> Any:
        answer = self._answer(method, path, body)
        try:
            return answer.json()
        except ValueError:
            raise UserError(f"{self.url}: another program answers there, without JSON") from None

    def _answer(
        self, method: str, path: str, body: str = "", timeout: float = _TIMEOUT
    ) -> httpx.Response:
        headers = {TOKEN_HEADER: self.token, "content-type": "application/json"}
        headers["authorization"] = f"Bearer {self.token}"  # the token is an API key, too
        try:
            known: bool | ssl.SSLContext = True
            if self.certificate is not None:
                known = trusting(self.certificate, at_any_time=True)
            with httpx.Client(timeout=timeout, trust_env=False, verify=known) as http:
                answer = http.request(method, self.url + path, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise UserError(f"{self.url}: no server answers there ({error})") from None
        if not answer.is_success:  # or a redirection
            kind = Refusal if answer.is_client_error else UserError
            reason = refusal(answer.text) or f"status {answer.status_code}"
            raise kind(f"{self.url}: {reason}")
        return answer


def url_of(host: str, port: int, encrypted: bool = False) -> str:
    """The address of a server that listens at that host and port."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if encrypted else 'http'}://{name}:{port}"


@contextmanager
def announced(
    url: str,
    pair: PairSpec,
    operation: Operation,
    certificate: Path | None = None,
    engine: str | None = None,
) -> Iterator[None]:
    """Other processes of the user on this machine can find and operate the server at `url` during
    the block."""
    url, token = _from_here(url), operation.token or ""
    address = httpx.URL(url)
    path = _folder() / f"{address.port or _PORTS[address.scheme]}{_here('json')}"
    with atomic_path(path, mode=0o600) as temporary:
        own = None if certificate is None else own_certificate(certificate)
        server = RunningServer(url=url, token=token, pair=pair, certificate=own, engine=engine)
        temporary.write_text(server.model_dump_json())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if operation.deployed is not None:
            operation.deployed.unlink(missing_ok=True)


def new_operation(port: int) -> Operation:
    """For a server that starts at this port: a new token, and nothing deployed. The file has a name
    of its own, as an earlier server may have left one where this server's process will run. Old
    ones of this machine's servers at this port are removed: a server that is killed leaves its."""
    for left in _folder().glob(f"{port}-*{_here('deployed')}"):
        with suppress(FileNotFoundError):  # another server that starts has removed it
            if left.stat().st_mtime < time() - _KEPT:
                left.unlink()
    deployed = _folder() / f"{port}-{secrets.token_hex(4)}{_here('deployed')}"
    return Operation(secrets.token_urlsafe(32), deployed)


def find_server(url: str | None = None) -> RunningServer:
    """This machine's server of this workspace at `url`, or its only server; otherwise a server at
    `url` with the token in the environment. Raises :class:`UserError`."""
    found = list(_servers())
    if url is not None:
        wanted = _from_here(url.rstrip("/"))
        token = os.environ.get(TOKEN)
        found = [server for server in found if _same(server.url) == _same(wanted)]
        if token and not found:
            return RunningServer(url=wanted, token=token)
    if not found:
        where = f" at {url}" if url else ""
        raise UserError(
            f"no server of this workspace{where} on this machine ({_folder()});"
            " `specdec serve` starts one"
        )
    if len(found) > 1:
        known = ", ".join(server.url for server in found)
        raise UserError(f"several servers run here; say which with --url: {known}")
    return found[0]


def _from_here(url: str) -> str:
    """The address of a server at `url` for clients on this machine. Raises :class:`UserError`."""
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url}: no URL of a server: {error}") from None
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host)  # of every address, one
    # Without a port that the scheme implies: the same address is written in one way.
    return str(address if here is None else address.copy_with(host=here))


def _same(url: str) -> str:
    """An address to compare. TLS verifies the name in the one that is asked."""
    address = httpx.URL(url)
    return str(address.copy_with(host="127.0.0.1") if address.host == "localhost" else address)


def _folder() -> Path:
    return workspace() / "servers"


def _here(kind: str) -> str:
    """The end of the names of this machine's files of a kind."""
    return f"@{gethostname()}.{kind}"


def _servers() -> Iterator[RunningServer]:
    for file in sorted(_folder().glob(f"*{_here('json')}")):
        with suppress(FileNotFoundError):  # the server has just stopped
            yield parse_json(RunningServer, file.read_bytes(), str(file))
