"""What a server starts from, in the process that runs it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from cluster.serving.engine_fleet import EngineFleet
from cluster.serving.engine_loop import QUEUE, EngineLoop
from cluster.serving.engine_process import HERE, STEP, EngineProcess
from cluster.serving.external.app import ExternalService
from cluster.serving.external.process import ExternalServer, Program
from cluster.serving.fleet import Fleet
from cluster.serving.hosts import DeviceHost
from cluster.serving.http.access import EVERYBODY, Access
from cluster.serving.http.pages import Page
from cluster.serving.http.samples import PromptSampling
from cluster.serving.http.service import Service
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, S, ServedEngine
from cluster.session import resources
from specdec_core.config import Placement
from specdec_core.engine.scheduler import Limits

LIMITS = Limits(4, share_prefixes=True)


@dataclass(frozen=True)
class Start:
    """What a server serves, and how.

    Args:
        deployment: what is served; the sampling of its configuration is the requests' default.
        limits: the requests that a replica decodes together, and what its steps and cache hold.
        queue: the requests that may wait at a replica; more are refused.
        cores: the CPU cores that the engines' threads run on, the same number for each replica;
            unset, any.
        placement: the devices of the models; unset, every replica takes its devices itself.
        replicas: the number of engines.
        access: which clients are answered, and their limits.
        operation: how the server is operated while it runs.
        step_timeout: the seconds that a step may take; an engine that takes longer is restarted.
        engine: another program's server, as `--engine` takes it, that answers; unset, this
            library's engine.
        arguments: further words of that server's command line.
        page: what this library's server shows at `/`.
        samples: the share of its prompts that is kept, and the folder; unset, none.
    """

    deployment: Deployment
    limits: Limits = LIMITS
    queue: int = QUEUE
    cores: tuple[int, ...] = ()
    placement: Placement | None = None
    replicas: int = 1
    access: Access = EVERYBODY
    operation: Operation = NOT_OPERATED
    step_timeout: float = STEP
    engine: str | None = None
    arguments: tuple[str, ...] = ()
    page: Page | None = None
    samples: PromptSampling | None = None

    @property
    def needs(self) -> dict[str, float]:
        """The Ray resources of a replica; with a placement, its devices are reserved by that.
        Another program's servers are children of one process, which has the resources of all."""
        if self.placement is not None and self.engine is None:
            return {"CPU": 0.0, "GPU": 0.0}
        runner, count = self.deployment.pair.runner, self.replicas
        each = resources(runner.threads, runner.device)
        if self.engine is None:
            return each
        return {"CPU": count * each["CPU"], "GPU": count * each["GPU"] * self.devices}

    @property
    def devices(self) -> int:
        """The devices that share the target."""
        return 1 if self.placement is None else self.placement.target.devices

    def service(self) -> Service:
        """Load the models of all replicas. Raises :class:`UserError` where they cannot be used."""
        fleet = EngineFleet(self._loaded(self._load), self.operation)
        return Service(fleet, self.name, self.access.admitting(self.operation.token))

    def external(self) -> ExternalService:
        """Start another program's servers. Raises :class:`UserError` where one does not start."""
        fleet = Fleet(self._loaded(self._start), self.operation)
        access = self.access.admitting(self.operation.token)
        return ExternalService(fleet, self.name, access, self.queue * self.replicas)

    @property
    def name(self) -> str:
        """The name of the model that clients give."""
        return self.deployment.pair.name

    def _loaded(self, load: Callable[..., S]) -> list[S]:
        """The engines of all replicas, which `load` makes side by side."""
        # Ray Serve may start this process again, after files were overwritten.
        deployment = (self.operation.last() or self.deployment).as_here()
        with ThreadPoolExecutor(self.replicas) as pool:
            return [*pool.map(partial(load, deployment=deployment), range(self.replicas))]

    def _start(self, number: int, deployment: Deployment) -> ExternalServer:
        """The server of the replica of a number, a child of this process."""
        assert self.engine is not None
        gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        program = Program(
            self.engine,
            self.name,
            self.limits.slots,
            self._cores(number),
            tuple(gpus[number * self.devices : (number + 1) * self.devices]) or None,
            self.devices,
            self.arguments,
            self.step_timeout,
        )
        server = ExternalServer(str(number), program, deployment)
        server.start()
        return server

    def _load(self, number: int, deployment: Deployment) -> ServedEngine:
        """The engine of the replica of a number: a child of this process, or, where there are
        several or they are placed, on devices that Ray finds for it."""
        child = self.replicas == 1 and self.placement is None
        host = HERE if child else DeviceHost(self.needs, self.placement)
        try:
            asyncio.run(host.wait())  # this thread has no event loop
            engine = EngineProcess(
                deployment.pair,
                deployment.configuration,
                self.limits,
                self._cores(number),
                self.step_timeout,
                host,
            )
            return ServedEngine(EngineLoop(engine, self.queue), deployment)
        except BaseException:
            host.close()
            raise

    def _cores(self, number: int) -> tuple[int, ...]:
        """The cores of a replica."""
        count = len(self.cores) // self.replicas
        return self.cores[number * count : (number + 1) * count]
