"""Serve a pair under one configuration over HTTP with Ray Serve."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.placed_engine import check_models
from cluster.serving.control import TOKEN, announced, new_operation, url_of
from cluster.serving.engine_loop import QUEUE
from cluster.serving.engine_process import STEP
from cluster.serving.http.access import EVERYBODY, Access
from cluster.serving.http.app import build_app
from cluster.serving.http.listener import CONNECTIONS, DRAIN, Listener
from cluster.serving.http.pages import Page
from cluster.serving.http.samples import PromptSampling
from cluster.serving.keeper import end_with_parent
from cluster.serving.replicas.fleet import Fleet
from cluster.serving.replicas.number import ONE, Replicas
from cluster.serving.replicas.replica import EngineReplica
from cluster.serving.replicas.routing import PrefixRouter
from cluster.serving.replicas.service import ReplicatedService
from cluster.serving.served import Operation
from cluster.serving.start import Start
from cluster.serving.tls import Tls
from cluster.session import (
    check_alive,
    ray_session,
    resources,
    room,
    several_nodes,
    user_error,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, Placement, run_time
from specdec_core.drafting.states import STATES, find_state, load_state
from specdec_core.drafting.trained import weights_here
from specdec_core.engine.scheduler import Limits
from specdec_core.evidence.certificate.certificate import find_certificate
from specdec_core.models.pair import check_pair

# What Ray Serve's proxy has no option for, unless the user has set it.
_PROXY = {
    # On a busy laptop it takes longer to start than the 5 s that the controller grants it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # An answer has a message for each round. By gRPC one takes half the CPU time of an object of
    # Ray's, and without a thread of its own the router hands requests on sooner.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 2**20),  # a whole answer is one
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
for _name, _value in _PROXY.items():
    os.environ.setdefault(_name, _value)

APPLICATION = "specdec"
LIMITS = Limits(4, share_prefixes=True)
_LOOK = 0.1  # seconds between looks at whether a replica has drained
_CLOSING = 1.0  # seconds in which a replica that has drained ends
REFUSALS = 64  # requests that a replica may be refusing while all others wait


@serve.deployment(name="completions", max_constructor_retry_count=1)
@serve.ingress()
class CompletionServer:
    """One pair, one engine, one HTTP application: nothing is between them."""

    def __init__(
        self,
        start: Start,
        page: Page | None = None,
        samples: PromptSampling | None = None,
        listener: Listener | None = None,
    ) -> None:
        end_with_parent()
        self._page, self._samples, self._listener = page, samples, listener
        self._devices = ExitStack()  # the replica's until it ends
        self._service = start.service(self._devices)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._service, self._page, self._samples, self._listener)

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose engine failed."""
        self._service.loop.check()


@serve.deployment(
    name="ingress",
    max_constructor_retry_count=1,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress()
class Ingress:
    """The HTTP application before several replicas with engines."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        engines: DeploymentHandle[Any],
        start: Start,
        page: Page | None = None,
        samples: PromptSampling | None = None,
        listener: Listener | None = None,
    ) -> None:
        end_with_parent()
        fleet = Fleet(engines, start.deployment(), start.operation)
        self._page, self._samples, self._listener = page, samples, listener
        facts = await fleet.facts()
        access = start.access.admitting(start.operation.token)
        self._service = ReplicatedService(fleet, facts, start.model, access)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._service, self._page, self._samples, self._listener)


def check_servable(
    spec: PairSpec, configuration: Configuration, placement: Placement | None = None
) -> None:
    """Check, before anything is started, that the pair can be loaded, has the configuration's
    drafts and, for asynchronous drafting, a device for them. Raises :class:`UserError`."""
    check_pair(spec)
    check_models(spec, configuration, placement)


def learned_state(spec: PairSpec, configuration: Configuration) -> Path | None:
    """The file of the state learned while serving: one in the workspace for each pair and
    configuration. None where nothing is learned across requests. Raises :class:`UserError` when
    that file, or one that the configuration starts from, is no state of its drafter."""
    drafter = configuration.drafter
    if drafter is None or not drafter.keeps_state:
        return None
    path = workspace() / STATES / f"serve-{spec.name}-{configuration.id}.json"
    for file in (*map(find_state, drafter.states), *([path] if path.exists() else [])):
        run_time(drafter).check_state(drafter, load_state(file), str(file))
    return path


def certified(spec: PairSpec, configuration: Configuration) -> str | None:
    """What the workspace's certificate of a configuration says; None where it has none."""
    certificate = find_certificate(spec, configuration)
    return None if certificate is None else certificate.sentence


def check_room(spec: PairSpec, replicas: Replicas) -> None:
    """Raises :class:`UserError` where the cluster has no room for the replicas."""
    needs = resources(spec.runner.threads, spec.runner.device)
    if (most := room(needs)) < replicas.least:
        each = " and ".join(f"{count:g} {kind}" for kind, count in needs.items() if count)
        raise UserError(
            f"--replicas {replicas.least}: the cluster has room for {most}, as each takes {each}"
        )


def check_cores(cores: Sequence[int], replicas: Replicas = ONE) -> None:
    """Raises :class:`UserError` for cores that this machine does not have, or that the replicas
    cannot share."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("--cores: this system does not bind threads to cores")
    known = range(os.cpu_count() or 1)
    for core in cores:
        if core not in known:
            raise UserError(f"--cores {core}: the cores are 0 to {known[-1]}")
    if len(cores) % replicas.most:
        raise UserError(
            f"--cores: {len(cores)} cores are not the same number for each of {replicas.most}"
            " replicas"
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
        reason = error.strerror or str(error)
        raise UserError(f"cannot listen on {host}:{port}: {reason.lower()}") from None


def application(
    spec: PairSpec,
    configuration: Configuration,
    limits: Limits = LIMITS,
    model: str | None = None,
    placement: Placement | None = None,
    queue: int = QUEUE,
    access: Access = EVERYBODY,
    page: Page | None = None,
    replicas: Replicas = ONE,
    samples: PromptSampling | None = None,
    step_timeout: float = STEP,
) -> serve.Application:
    """The Ray Serve application, for the cluster that this process is connected to. `limits` are
    those of a replica, where `queue` more requests may wait; `model` is the name that clients give,
    the pair's when unset; `placement` sets the models' devices, otherwise the replica has them;
    `access` says who may ask for how much; `page` is shown at `/`; there are so many `replicas`;
    `samples` of prompts are kept; an engine whose step takes longer than `step_timeout` seconds is
    started again.

    Raises :class:`UserError` where the pair or the configuration cannot be used.
    """
    check_servable(spec, configuration, placement)
    start = Start(
        spec,
        configuration,
        limits,
        model or spec.name,
        learned_state(spec, configuration),
        placement,
        queue,
        certificate=certified(spec, configuration),
        operation=Operation(os.environ.get(TOKEN) or None),
        access=access,
        weights=weights_here(spec, [configuration]),
        step_timeout=step_timeout,
    )
    return _bound(start, replicas, page, samples)


def _bound(
    start: Start,
    replicas: Replicas,
    page: Page | None,
    samples: PromptSampling | None,
    listener: Listener | None = None,
    drain: float = DRAIN,
) -> serve.Application:
    spec, limits = start.pair, start.limits
    needs = {"CPU": 0.0, "GPU": 0.0}
    if start.placement is None:
        needs = resources(spec.runner.threads, spec.runner.device)
    own = {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"]}
    requests = limits.slots + start.queue  # at a replica
    ending = {
        "graceful_shutdown_timeout_s": drain + _CLOSING,
        "graceful_shutdown_wait_loop_s": _LOOK,
    }
    if replicas.most == 1:
        server = CompletionServer.options(  # type: ignore[attr-defined]  # the decorator made one
            ray_actor_options=own, max_ongoing_requests=requests + REFUSALS, **ending
        )
        return server.bind(start, page, samples, listener)
    engines = EngineReplica.options(  # type: ignore[attr-defined]
        ray_actor_options=own,
        max_ongoing_requests=requests + REFUSALS,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,  # type: ignore[arg-type]  # pydantic's plugin errs
            request_router_kwargs={"slots": limits.slots},
        ),
        **replicas.options(limits.slots),
        **ending,
    )
    ingress = Ingress.options(  # type: ignore[attr-defined]
        max_ongoing_requests=replicas.most * requests + REFUSALS, **ending
    )
    return ingress.bind(engines.bind(start, replicas.most), start, page, samples, listener)


@contextmanager
def serving(
    spec: PairSpec,
    configuration: Configuration,
    *,
    limits: Limits = LIMITS,
    host: str = "127.0.0.1",
    port: int = 8000,
    model: str | None = None,
    placement: Placement | None = None,
    queue: int = QUEUE,
    cores: Sequence[int] = (),
    fresh: bool = False,
    source: str = "",
    version: int | None = None,
    access: Access = EVERYBODY,
    page: Page | None = None,
    replicas: Replicas = ONE,
    samples: PromptSampling | None = None,
    tls: Tls | None = None,
    drain: float = DRAIN,
    step_timeout: float = STEP,
) -> Iterator[str]:
    """Serve while the block runs; yields the base URL once requests are answered. A bandit over
    drafters keeps learning, from its state when it was served last.

    Args:
        spec: the pair; every replica loads it.
        configuration: how requests are decoded; its sampling is their default.
        limits: requests decoded together, and what a step and the cache hold.
        queue: requests that may wait; others are refused.
        cores: the CPU cores that the engine's threads run on; unset, any.
        fresh: neither use nor keep what is learned while serving.
        access: who may ask for how much.
        page: what is shown at `/`.
        replicas: how many engines there are.
        samples: of which prompts are kept, and where; unset, none are.
        model: the name that clients give; the pair's name when unset.
        placement: the devices that the models are on; unset, every replica has them.
        source: where the configuration comes from, in words; and its `version`, if registered.
        tls: the certificate and key to encrypt with; unset, nothing is encrypted.
        drain: seconds that answers under way may still take when the block is left.
        step_timeout: seconds that a step may take; an engine that takes longer is started again.

    Raises:
        UserError: the pair, the configuration or the port cannot be used, or the replica failed.
    """
    check_servable(spec, configuration, placement)
    check_cores(cores, replicas)
    learned = None if fresh else learned_state(spec, configuration)
    if not os.environ.get("RAY_ADDRESS"):
        check_port(host, port)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with ray_session():
        operation = new_operation(port)
        start = Start(
            spec,
            configuration,
            limits,
            model or spec.name,
            learned,
            placement,
            queue,
            tuple(cores),
            source,
            version,
            certified(spec, configuration),
            operation,
            access,
            weights_here(spec, [configuration]),
            step_timeout,
        )
        # On several nodes the replica may be elsewhere; Ray Serve's proxy is on the head node.
        connections = CONNECTIONS + replicas.most * (limits.slots + queue)
        listener = None if several_nodes() else Listener(host, port, tls, drain, connections)
        bound = _bound(start, replicas, page, samples, listener, drain)
        if placement is None:
            check_room(spec, replicas)
        try:
            if listener is not None:
                serve.start(proxy_location="Disabled")
            else:
                listening = {"host": host, "port": port, **(tls.options if tls else {})}
                serve.start(proxy_location="HeadOnly", http_options=listening)
        except TimeoutError as error:
            raise UserError(f"the server did not start: {error}") from None
        try:
            try:
                serve.run(bound, name=APPLICATION, route_prefix="/")
            except RuntimeError:
                raise UserError(f"the server did not start: {_failure()}") from None
            url = url_of(host, port, tls is not None)
            with announced(url, spec, operation, tls.certificate if tls else None):
                yield url
        finally:
            check_alive()  # else Ray Serve would be waited for in vain
            serve.delete(APPLICATION)


def _failure() -> str:
    """Why the application failed: the last line of its replica's traceback."""
    application = serve.status().applications[APPLICATION]
    messages = [deployment.message for deployment in application.deployments.values()]
    lines = "\n".join([application.message, *messages]).strip().splitlines()
    return user_error(lines[-1]) or lines[-1].strip()
