"""What a server starts from, in whichever process that is."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cluster.placed_engine import placed_engine
from cluster.serving.engine_loop import QUEUE
from cluster.serving.engine_process import STEP, EngineProcess
from cluster.serving.http.access import EVERYBODY, Access
from cluster.serving.http.service import CompletionService
from cluster.serving.served import NOT_OPERATED, Deployment, Operation
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.engine import Engine
from specdec_core.engine.scheduler import Limits


@dataclass(frozen=True)
class Start:
    """The arguments of :func:`cluster.serving.deployment.serving`. `learned` is the file of what is
    learned while serving, `certificate` what the configuration's certificate says, `weights` the
    digests of what is served (:class:`cluster.serving.served.Deployment`)."""

    pair: PairSpec
    configuration: Configuration
    limits: Limits
    model: str
    learned: Path | None = None
    placement: Placement | None = None
    queue: int = QUEUE
    cores: tuple[int, ...] = ()
    source: str = ""
    version: int | None = None
    certificate: str | None = None
    operation: Operation = NOT_OPERATED
    access: Access = EVERYBODY
    weights: dict[str, str] | None = None
    step_timeout: float = STEP

    def deployment(self) -> Deployment:
        """What is served: what was deployed last, or else what the server was started with."""
        return self.operation.last() or Deployment(
            pair=self.pair,
            configuration=self.configuration,
            source=self.source,
            version=self.version,
            certificate=self.certificate,
            learned=self.learned,
            weights=self.weights,
        )

    def service(self, devices: ExitStack) -> CompletionService:
        """Load the models. What placed models take is given back when `devices` is closed. Raises
        :class:`UserError` where they cannot be used."""
        deployment = self.deployment()
        engine: Engine | EngineProcess
        if self.placement is None:
            engine = EngineProcess(
                deployment.pair,
                deployment.configuration,
                self.limits,
                self.cores,
                self.step_timeout,
            )
        else:
            engine = devices.enter_context(
                placed_engine(self.pair, self.configuration, self.limits, self.placement)
            )
        return CompletionService(
            engine,
            self.model,
            self.learned,
            self.queue,
            self.cores,
            self.access.admitting(self.operation.token),
            deployment,
            self.operation,
            self.step_timeout,
        )
