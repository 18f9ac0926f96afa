"""Serve a pair under one configuration over HTTP with Ray Serve."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from cluster.autoscaling import comes
from cluster.placed_engine import check_models
from cluster.serving.control import TOKEN, announced, new_operation, url_of
from cluster.serving.external.app import ExternalService, build_external_app
from cluster.serving.http.app import build_app
from cluster.serving.http.listener import CONNECTIONS, DRAIN, Listener
from cluster.serving.served import Deployment, Operation, learned_file
from cluster.serving.start import Start
from cluster.serving.tls import Tls
from cluster.session import alive_nodes, check_alive, ray_session, room, user_error
from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.keeper import end_with_parent
from specdec_core.config import Configuration, PairSpec
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.states import load_state
from specdec_core.drafting.trained import weights_here
from specdec_core.evidence.certificate.certificate import find_certificate
from specdec_core.models.pair import check_pair

_LOOK = 0.1  # seconds between checks whether the server has drained
_CLOSING = 15.0  # seconds in which a server that has drained ends; its command waits for 20
_LEAVING = 20.0  # seconds in which a server that is ending has left, by default: DRAIN and _CLOSING
_ENDING = 60.0  # seconds that Ray Serve may take for that, on a busy machine
REFUSALS = 64  # requests beyond the queue, which are being refused


@serve.deployment(name="completions", max_constructor_retry_count=1)
@serve.ingress()
class CompletionServer:
    """The HTTP application and the fleet that answers it, in one process."""

    def __init__(self, start: Start, listener: Listener | None = None) -> None:
        end_with_parent()
        self._start, self._listener = start, listener
        self._service = start.service() if start.engine is None else start.external()

    def __serve_build_asgi_app__(self) -> FastAPI:
        if isinstance(self._service, ExternalService):
            return build_external_app(self._service, self._listener)
        return build_app(self._service, self._start.page, self._start.samples, self._listener)

    def check_health(self) -> None:
        """Ray Serve replaces a server without an engine that works."""
        self._service.fleet.check()


def check_start(start: Start) -> None:
    """Check, before anything is started, that the pair can be loaded, has the configuration's
    drafts and, for asynchronous drafting, a device for them, and that the machine has the cores. If
    another program runs the target, neither its architecture nor its split is checked. Raises
    :class:`UserError`."""
    pair, configuration = start.deployment.pair, start.deployment.configuration
    check_pair(pair, served=start.engine is not None)
    check_models(pair, configuration, start.placement if start.engine is None else None)
    check_cores(start.cores, start.replicas)


def learned_state(spec: PairSpec, configuration: Configuration) -> Path | None:
    """The file of the state that is learned while serving: one in the workspace for each pair and
    configuration. None where nothing is learned across requests. Raises :class:`UserError` when
    that file, or one that the configuration starts from, is no state of its drafter."""
    drafter = configuration.drafter
    if drafter is None or not drafter.keeps_state:
        return None
    path = learned_file(spec, configuration)
    if isinstance(drafter, BanditSettings):
        bandit = build_bandit(drafter)  # from the state that the configuration names, if any
        if path.exists():
            bandit.restore(load_state(path), str(path))
    return path


def check_room(start: Start) -> None:
    """Raises :class:`UserError` where the cluster has no room for the replicas, and its autoscaler
    makes none."""
    if start.placement is not None and start.engine is None:
        return
    needs = start.needs
    most, asked = room(needs), 1 if start.engine is not None else start.replicas
    if most >= asked or comes(needs["CPU"], needs["GPU"], asked):
        return
    each = " and ".join(f"{count:g} {kind}" for kind, count in needs.items() if count)
    if start.engine is not None:  # all are on one node
        raise UserError(f"--engine {start.engine}: no node of the cluster has {each}")
    raise UserError(
        f"--replicas {start.replicas}: the cluster has room for {most}, as each takes {each}"
    )


def check_cores(cores: Sequence[int], replicas: int) -> None:
    """Raises :class:`UserError` for cores that this machine does not have, or that the replicas
    cannot share."""
    if not cores:
        return
    known = range(os.cpu_count() or 1)
    for core in cores:
        if core not in known:
            raise UserError(f"--cores {core}: the cores are 0 to {known[-1]}")
    if len(cores) % replicas:
        raise UserError(
            f"--cores: {len(cores)} cores are not the same number for each of {replicas} replicas"
        )


def check_port(host: str, port: int) -> None:
    """Raises :class:`UserError` when the port cannot be used, for instance because it is taken (Ray
    Serve itself would share it silently)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {os_reason(error)}") from None


def deployment_of(
    spec: PairSpec,
    configuration: Configuration,
    source: str = "",
    version: int | None = None,
    fresh: bool = False,
    engine: str | None = None,
) -> Deployment:
    """The deployment of a configuration with the certificate, the weights and, unless it starts
    `fresh`, the learned state that are here. In another program's server, `engine`, it has the
    certificate for that, and no state. Raises :class:`UserError` as :func:`learned_state`
    does."""
    certificate = find_certificate(spec, configuration, engine)
    return Deployment(
        pair=spec,
        configuration=configuration,
        source=source,
        version=version,
        certificate=None if certificate is None else certificate.sentence,
        learned=None if fresh or engine is not None else learned_state(spec, configuration),
        weights=weights_here(spec, [configuration]),
        fresh=fresh,
    )


def application(start: Start) -> serve.Application:
    """The Ray Serve application, for the cluster that this process is connected to. Operators know
    the token in the environment, if any."""
    return _bound(replace(start, operation=Operation(os.environ.get(TOKEN) or None)))


def _bound(
    start: Start, listener: Listener | None = None, drain: float = DRAIN
) -> serve.Application:
    # Each of several replicas of this library's engine has its own resources.
    several = start.replicas > 1 and start.engine is None
    needs = {"CPU": 0.0, "GPU": 0.0} if several else start.needs
    requests = start.replicas * (start.limits.slots + start.queue)
    server = CompletionServer.options(  # type: ignore[attr-defined]  # the decorator made one
        ray_actor_options={"num_cpus": needs["CPU"], "num_gpus": needs["GPU"]},
        max_ongoing_requests=requests + REFUSALS,
        graceful_shutdown_timeout_s=drain + _CLOSING,
        graceful_shutdown_wait_loop_s=_LOOK,
    )
    return server.bind(start, listener)


@contextmanager
def serving(
    start: Start,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tls: Tls | None = None,
    drain: float = DRAIN,
    tell: Callable[[str], object] = lambda _: None,
) -> Iterator[str]:
    """Serve while the block runs; yields the base URL once requests are answered. A bandit over
    drafters keeps learning, from its state when it was served last.

    Args:
        start: what is served, and how; it has been checked.
        host: the address to listen on.
        port: the port to listen on.
        tls: the certificate and key to encrypt with; unset, nothing is encrypted.
        drain: seconds that running requests may still take when the block is left.
        tell: gets a line where a server at the port is waited for, which is ending.

    Raises:
        UserError: the port cannot be used, or the server failed.
    """
    if not os.environ.get("RAY_ADDRESS"):
        check_port(host, port)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    # Another server on this cluster is another application.
    name = f"specdec-{port}"
    with ray_session():
        _check_free(name, port, tell)
        check_room(start)  # nodes may be added for it
        start = replace(start, operation=new_operation(port))
        connections = CONNECTIONS + start.replicas * (start.limits.slots + start.queue)
        # On several nodes the server may be on any; Ray Serve's proxy is on the head node.
        listener = None if len(alive_nodes()) > 1 else Listener(host, port, tls, drain, connections)
        bound = _bound(start, listener, drain)
        route = "/" if listener is None else None  # of Ray Serve's proxy
        options = {"host": host, "port": port, **(tls.options if tls else {})}
        with _serve_lasting():
            start_serve(HTTPOptions.model_validate(options) if listener is None else None)
        try:
            with _serve_lasting():
                try:
                    serve.run(bound, name=name, route_prefix=route)
                except RuntimeError:
                    raise UserError(f"the server did not start: {_failure(name)}") from None
            url = url_of(host, port, tls is not None)
            certificate = tls.certificate if tls else None
            with announced(url, start.deployment.pair, start.operation, certificate, start.engine):
                yield url
        finally:
            check_alive()  # else Ray Serve would be waited for in vain
            _end(name, drain)


def _check_free(name: str, port: int, tell: Callable[[str], object]) -> None:
    """Raises :class:`UserError` where the cluster has a server at the port, which Ray Serve would
    replace. One that is ending is waited for, for a moment, after a line to `tell`."""
    latest, told = monotonic() + _LEAVING, False
    while (there := serve.status().applications.get(name)) is not None:
        if there.status != ApplicationStatus.DELETING or monotonic() > latest:
            raise UserError(
                f"--port {port}: the cluster has a server at this port already; stop it, or what is"
                " left of it by `serve shutdown`, or take another port"
            )
        if not told:
            tell(f"--port {port}: waiting for the server there to end, {_LEAVING:g} s at most")
        told = True
        sleep(_LOOK)


def start_serve(listening: HTTPOptions | None) -> None:
    """Start Ray Serve, with a proxy that listens like this or, for None, without one. Ray Serve
    that runs already would keep its proxy, so it is ended first where it has no applications. Those
    that are ending are waited for. Raises :class:`UserError` where others have another proxy, or
    all paths of this one."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        there, latest = client.get_serve_details(), monotonic() + _LEAVING
        while listening is not None and _ending(there) and monotonic() < latest:
            sleep(_LOOK)
            there = client.get_serve_details()
        applications, proxies = there["applications"], there["proxies"]
        if not applications and (listening is not None or proxies):
            serve.shutdown()
        elif applications and listening is not None:
            names = ("host", "port", "ssl_certfile", "ssl_keyfile")
            same = all(getattr(client.http_config, n) == getattr(listening, n) for n in names)
            whole = any(each.get("route_prefix") == "/" for each in applications.values())
            if whole or not (proxies and same):
                raise UserError(
                    "on several nodes Ray Serve's proxy listens for one server, at one address;"
                    f" stop what the cluster has now: {', '.join(applications)}"
                )
    try:
        location = "Disabled" if listening is None else "HeadOnly"
        serve.start(proxy_location=location, http_options=listening)
    except TimeoutError as error:
        raise UserError(f"the server did not start: {error}") from None


def _ending(there: dict[str, Any]) -> bool:
    """Whether an application of Ray Serve, by its details, is ending."""
    statuses = [application["status"] for application in there["applications"].values()]
    return ApplicationStatus.DELETING in statuses


def _end(name: str, drain: float) -> None:
    """Have Ray Serve end the application, also should this process be killed meanwhile, and wait
    until it has. Ray Serve's own wait is a minute, in which running requests may not end."""
    with suppress(RayServeException, ActorDiedError):  # Ray Serve as a whole has ended
        serve.delete(name, _blocking=False)
        latest = monotonic() + drain + _ENDING
        while name in serve.status().applications and monotonic() < latest:
            sleep(_LOOK)


@contextmanager
def _serve_lasting() -> Iterator[None]:
    """Raises :class:`UserError` where Ray Serve ends during the block, or takes no application: on
    several nodes, another server that starts may end it."""
    try:
        yield
    except (RayServeException, RayActorError):
        raise UserError(
            "the server did not start: Ray Serve was ended meanwhile, perhaps by another server of"
            " this cluster that starts, too; give the command again"
        ) from None


def _failure(name: str) -> str:
    """Why the application of this name failed: the last line of its replica's traceback."""
    application = serve.status().applications[name]
    messages = [deployment.message for deployment in application.deployments.values()]
    lines = "\n".join([application.message, *messages]).strip().splitlines()
    return user_error(lines[-1]) or lines[-1].strip()
