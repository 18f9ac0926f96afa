"""A deployment in another program's server, which runs in a process."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import aiohttp

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.engine_process import STEP
from cluster.serving.served import Deployment, Served
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.evidence.certificate.certificate import find_certificate
from specdec_core.servers.answers import served_pair
from specdec_core.servers.model_files import models_in
from specdec_core.servers.process import ServerProcess, free_port
from specdec_core.servers.server import ServedMode
from specdec_core.servers.table import server_of

LOGS = "servers"  # folder in the workspace
# Settings that decide how much is held, and where the models are.
_SIZES = frozenset(
    {
        "model",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "ctx-size",
    }
)
_KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY")  # variables with the key that a program asks for
_LOGS_KEPT = 50
_PATIENCE = 15.0  # seconds in which a process ends after the request to
_AT_ONCE = 0.5  # the same, where the server stops
_ANSWER = 10.0  # seconds in which it answers about itself
LOOK = 10.0  # seconds between looks at its counts
_KEEP = 2.0  # seconds that an idle connection is used again; the program may close it at 5
# Headers that aiohttp would add; only the client's are sent on.
_AUTOMATIC = ("accept", "accept-encoding", "content-type", "user-agent")
_FAILURES = (aiohttp.ClientError, TimeoutError)


def log_file(name: str) -> Path:
    """The workspace's file for what a program prints. Of the other files the latest are kept."""
    logs = workspace() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another replica removes some just now
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
        patience: the seconds that it may take to answer about its health, or to count a token while
            it has requests (then at least two looks); after that it is taken to hang.
    """

    engine: str
    model: str
    slots: int = 4
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None
    devices: int = 1
    arguments: tuple[str, ...] = ()
    patience: float = STEP

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


class ExternalServer(Served):
    """A deployment in a server of `program`, the replica `name`'s. `running` requests pass through
    it, of which `delivering` wait for their client to read. Its process does not answer before
    :meth:`start`."""

    elsewhere = True
    running = delivering = 0

    def __init__(self, name: str, program: Program, deployment: Deployment) -> None:
        super().__init__(deployment)
        self.name, self.program = name, program
        self.worked = monotonic()  # when a request began, or tokens came or were counted
        self._counted: tuple[float, ...] = ()
        self.key = secrets.token_urlsafe()  # of the process's port, which other users can reach
        self.url = ""
        self._ended: str | None = None  # why it does not work
        self._folder = TemporaryDirectory()
        self._process: ServerProcess | None = None
        self._closed = False
        self._mode: ServedMode | None = None

    def start(self) -> None:
        """Start the process, and return once it answers. Raises :class:`UserError`; then nothing
        remains of it."""
        try:
            self._mode = self.program.prepare(self.deployment, Path(self._folder.name), self.key)
            self.describe(self.deployment)
            identity = self.deployment.configuration.id
            # By its configuration, too: until it is replaced, it writes beside its successor.
            log = log_file(f"{self.program.engine}-{os.getpid()}-{self.name}-{identity}")
            self._process = self._mode.process(self.program.engine, self.program.slots, log)
            if self._closed:  # by another thread; from here on that stops the process
                raise UserError(f"{self.program.engine}: stopped before it was ready")
            self.url = self._process.start(free_port())
        except BaseException:
            self.end()
            raise
        self.worked = monotonic()

    async def beside(self, deployment: Deployment) -> ExternalServer:
        other = ExternalServer(self.name, self.program, deployment)
        try:
            await asyncio.to_thread(other.start)
        except asyncio.CancelledError:  # the thread continues until its process is ended
            await asyncio.to_thread(other.end)
            raise
        return other

    @property
    def waiting(self) -> int:
        return max(self.running - self.program.slots, 0)

    @cached_property
    def http(self) -> aiohttp.ClientSession:
        """Of the event loop that first asks for it. Bytes pass as they are."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC,
        )

    # Whether it works.

    @property
    def failure(self) -> EngineFailed | None:
        if self._ended is None and self._process is not None:
            try:
                self._process.check()
            except UserError as error:
                self._ended = str(error)
        return None if self._ended is None else EngineFailed(self._ended)

    async def probe(self) -> bool:
        """Ends the process where it does not answer, or has requests and counts no tokens: a front
        end may answer while its engine hangs."""
        reason, patience = None, self.program.patience
        counting = max(patience, 2 * LOOK)
        if self.idle > counting:
            reason = f"it has requests, and counts no token for over {counting:g} s"
        elif not await self._healthy(patience):
            reason = f"its /health fails, or takes over {patience:g} s"
        if self.works and reason is not None:
            self._ended = reason
            await asyncio.to_thread(self.end)
        return self.works

    async def check_engine(self) -> None:
        """Raises :class:`EngineFailed` where it does not work: vLLM's front end outlives its engine
        for a moment, and reports the engine's end as its own errors."""
        if not (self.works and await self._healthy(_ANSWER)):
            raise EngineFailed(f"server {self.name}: its engine has ended")

    async def _healthy(self, patience: float) -> bool:
        limit = aiohttp.ClientTimeout(patience)
        with suppress(*_FAILURES):
            async with self.http.get(f"{self.url}/health", timeout=limit) as answer:
                return answer.ok
        return False

    async def metrics(self) -> str | None:
        """Its page of metrics, empty where it has none; None where it does not answer."""
        key = {"authorization": f"Bearer {self.key}"}
        url, limit = f"{self.url}/metrics", aiohttp.ClientTimeout(_ANSWER)
        with suppress(*_FAILURES):
            async with self.http.get(url, headers=key, timeout=limit) as answer:
                return await answer.text() if answer.ok else ""
        return None

    def has_counted(self, tokens: tuple[float, ...]) -> None:
        """The program's counts of tokens. One that has no such counts is taken to work."""
        if not tokens or tokens != self._counted:
            self._counted, self.worked = tokens, monotonic()

    @property
    def idle(self) -> float:
        """Seconds without work for its requests; 0 where none waits for it. A program cannot go on
        with an answer that its client does not read."""
        return monotonic() - self.worked if self.running > self.delivering else 0.0

    # What is served, and its end.

    def describe(self, deployment: Deployment) -> None:
        """Also, the certificate names what is different here from where it was checked."""
        self.deployment = self._as_certified(deployment)

    def _as_certified(self, deployment: Deployment) -> Deployment:
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

    async def close(self) -> None:
        await self.http.close()

    def end(self, at_once: bool = False) -> None:
        """Also, its files are removed. A process that has not ended in time is killed."""
        self._closed = True
        if self._process is not None:
            self._process.stop(_AT_ONCE if at_once else _PATIENCE)
        self._folder.cleanup()
