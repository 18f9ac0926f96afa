"""A deployment in another program's server: a process, which is started again where it ends."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, time

from cluster.serving.replica import AT_ONCE, pause_after
from cluster.serving.served import Deployment
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.evidence.certificate.certificate import find_certificate
from specdec_core.servers.answers import served_pair
from specdec_core.servers.model_files import models_in
from specdec_core.servers.process import ServerProcess, free_port
from specdec_core.servers.server import ServedMode
from specdec_core.servers.table import server_of

logger = logging.getLogger(__name__)

LOGS = "servers"  # folder in the workspace
# Settings that decide how much is held, and where the models are.
_SIZES = frozenset({"model", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "ctx-size"})
_KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY")  # variables with the key that a program asks for
_LOGS_KEPT = 50
_PATIENCE = 15.0  # seconds in which a process ends after the request to


def log_file(name: str) -> Path:
    """The workspace's file for what a program prints. Of the other files the latest are kept."""
    logs = workspace() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    by_age = sorted(logs.glob("*.log"), key=lambda file: file.stat().st_mtime)
    for file in by_age[:-_LOGS_KEPT]:
        file.unlink(missing_ok=True)
    return logs / f"{name}.log"


@dataclass(frozen=True)
class Program:
    """How a replica's server is started.

    Args:
        engine: the server, as `--engine` takes it.
        model: the name that clients give.
        slots: the requests that are decoded together.
        cores: the CPU cores of its compute threads; none: any.
        gpus: the GPUs that it sees, as CUDA numbers them; None: all.
        devices: the devices that share the target.
        arguments: further words of its command line.
    """

    engine: str
    model: str
    slots: int = 4
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None
    devices: int = 1
    arguments: tuple[str, ...] = ()

    def prepare(self, deployment: Deployment, folder: Path, key: str) -> ServedMode:
        """The server in the mode for a deployment, which asks for `key`; its files are in `folder`.
        Raises :class:`UserError` where it is not installed or has no such mode."""
        server = server_of(self.engine, stage="serve", option="--engine")
        pair = served_pair(deployment.pair)
        mode = server.mode_of(deployment.configuration, models_in(server, pair))
        served = server.served(pair, mode, self.cores, folder)
        environment = {**served.environment, **dict.fromkeys(_KEYS, key)}
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)

        def command(requests: int, port: int) -> Sequence[str]:
            alone = served.command(requests, port)
            return [*server.in_production(alone, self.model, self.devices), *self.arguments]

        return replace(served, command=command, environment=environment)


class ExternalServer:
    """A deployment in a server of `program`. `running` requests pass through it."""

    def __init__(self, name: str, program: Program, deployment: Deployment) -> None:
        self.name, self.program, self.deployment = name, program, deployment
        self.running = 0
        self.worked = monotonic()  # when a request began, or tokens came or were counted
        self._counted: tuple[float, ...] = ()
        self.since = int(time())
        self.key = secrets.token_urlsafe()  # of the process's port, which other users can reach
        self.url: str | None = None  # while requests are answered
        self._ended = "it does not answer"  # why there is none
        self.failing = 0  # starts in a row after which the process has ended at once
        self._started = monotonic()
        self._folder = TemporaryDirectory()
        self._process: ServerProcess | None = None
        self._closed = False
        self._mode: ServedMode | None = None

    def start(self) -> None:
        """Start the process, and return once it answers. Raises :class:`UserError`."""
        mode = self._mode = self._mode or self.program.prepare(
            self.deployment, Path(self._folder.name), self.key
        )
        self.deployment = self.as_certified(self.deployment)
        identity = self.deployment.configuration.id
        # By its configuration, too: until it is replaced, it writes beside its successor.
        log = log_file(f"{self.program.engine}-{os.getpid()}-{self.name}-{identity}")
        self._process = mode.process(self.program.engine, self.program.slots, log)
        self._check_open()  # from here on `close` stops this process, also one that never started
        self._started = monotonic()
        url = self._process.start(free_port())
        self._check_open()
        self.url, self._started = url, monotonic()
        self.worked, self._counted = monotonic(), ()

    def _check_open(self) -> None:
        """Raises :class:`UserError` where another thread has closed it meanwhile."""
        if self._closed:
            raise UserError(f"{self.program.engine}: stopped before it was ready")

    def failed(self) -> str | None:
        """Why the process has ended, if it has; then it has no address."""
        if self._process is not None and self.url is not None:
            try:
                self._process.check()
            except UserError as error:
                self.url, self._ended = None, str(error)
        return self._ended if self.url is None else None

    def has_counted(self, tokens: tuple[float, ...]) -> None:
        """The program's counts of tokens. One that has no such counts is taken to work."""
        if not tokens or tokens != self._counted:
            self._counted, self.worked = tokens, monotonic()

    @property
    def idle(self) -> float:
        """Seconds without work for its requests; 0 without requests."""
        return monotonic() - self.worked if self.running else 0.0

    def as_certified(self, deployment: Deployment) -> Deployment:
        """`deployment`, with a certificate that names what is different here from where it was
        checked."""
        engine, mode = self.program.engine, self._mode
        if deployment.certificate is None or mode is None:
            return deployment
        found = find_certificate(deployment.pair, deployment.configuration, engine)
        if found is None or found.server is None:  # it is on the machine that asked for this
            return deployment
        then, now = found.server.settings, mode.settings
        other = [n for n in sorted(then.keys() | now.keys()) if then.get(n) != now.get(n)]
        other = [name for name in other if name not in _SIZES]
        other += [f"version ({mode.version})"] * (found.server.version != mode.version)
        other += ["devices"] * (self.program.devices > 1)
        other += [word for word in self.program.arguments if word.startswith("-")]
        remark = f"; here with other settings: {', '.join(other)}" if other else ""
        return deployment.model_copy(update={"certificate": found.sentence + remark})

    def restart(self) -> None:
        """Start the process again. Raises :class:`UserError`."""
        self.failing = self.failing + 1 if monotonic() - self._started < AT_ONCE else 0
        self.stop()
        self.start()

    @property
    def pause(self) -> float:
        """Seconds until it is started again."""
        return pause_after(self.failing)

    def stop(self, patience: float = _PATIENCE) -> None:
        """End the process; after `patience` seconds it is killed."""
        self.url = None
        if self._process is not None:
            self._process.stop(patience)

    def close(self, patience: float = _PATIENCE) -> None:
        """End the process for good, and remove its files."""
        self._closed = True
        self.stop(patience)
        self._folder.cleanup()
