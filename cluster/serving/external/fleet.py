"""The replicas of another program's server, and the deployment that all of them serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.serving.drift import Drift
from cluster.serving.engine_loop import EngineFailed
from cluster.serving.external.process import ExternalServer, Program
from cluster.serving.fleet import check_deployable, every
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, run_as
from specdec_core.base.errors import UserError
from specdec_core.servers.completions import ACCEPTED, CANDIDATES

logger = logging.getLogger(__name__)

_WATCH = 1.0  # seconds between looks at the processes
_LOOK = 10.0  # seconds between looks at the metrics
_AT_THE_END = 0.5  # seconds that processes without requests have to end before they are killed
_DRAINED = 0.05  # seconds between looks at whether an old server has finished
# What grows while vLLM or llama.cpp works on requests, without the prefix.
_TOKENS = ("prompt_tokens_total", "generation_tokens_total", "n_decode_total")


class ExternalFleet:
    """A server for each of `programs`. Use as `async with`. A process that ends, or does not answer
    `/health` for `patience` seconds, is started again.

    Raises:
        UserError: a server does not start.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        deployment: Deployment,
        operation: Operation = NOT_OPERATED,
        patience: float = 300.0,
    ) -> None:
        self.programs, self.operation, self.patience = programs, operation, patience
        self.previous: Deployment | None = None  # to which a rollback returns
        self.switches = self.restarts = 0
        self.drift = Drift()
        self.servers = self._load(deployment)
        self.deployment = self.servers[0].deployment
        self._changing = asyncio.Lock()
        # What follows each server, and what waits for each old one to finish its requests.
        self._tasks: dict[ExternalServer, asyncio.Task[None]] = {}
        self._loading: list[ExternalServer] = []
        self._counted = (0.0, 0.0)

    async def __aenter__(self) -> ExternalFleet:
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.AsyncClient(limits=unlimited, timeout=None, trust_env=False)
        self._reading = asyncio.create_task(every(_LOOK, self._look_at_metrics))
        self._follow(self.servers)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._reading, *self._tasks.values()):
            task.cancel()
        await self.http.aclose()

    def end(self) -> None:
        """End all processes, within a second."""
        _close([*self._tasks, *self._loading], _AT_THE_END)

    @property
    def slots(self) -> int:
        return sum(program.slots for program in self.programs)

    @property
    def running(self) -> int:
        """Requests that pass through."""
        return sum(server.running for server in self._tasks)

    @property
    def working(self) -> list[ExternalServer]:
        """The servers that answer."""
        return [server for server in self.servers if server.url is not None]

    def check(self) -> None:
        """A server that has ended is always started again, so that there is nothing to check."""

    def choose(self) -> ExternalServer:
        """The least busy server that answers. Raises :class:`EngineFailed`."""
        if not (working := self.working):
            raise EngineFailed("no server answers")
        return min(working, key=lambda server: server.running)

    async def check_engine(self, server: ExternalServer) -> None:
        """Raises :class:`httpx.RemoteProtocolError` where the server does not work: vLLM's front
        end outlives its engine for a moment, and reports the engine's end as its own errors."""
        if server.failed() is None:
            with suppress(httpx.HTTPError):
                if (await self.http.get(f"{server.url}/health", timeout=_LOOK)).is_success:
                    return
        raise httpx.RemoteProtocolError(f"server {server.name}: its engine has ended")

    # What is served.

    async def deploy(self, deployment: Deployment) -> Deployment:
        """Start servers with this beside the present ones, and have them answer new requests. The
        old ones finish their requests, and end. Raises :class:`UserError` where one does not start;
        then, and where this is cancelled before, everything stays unchanged."""
        async with self._changing:
            pair = run_as(self.deployment.pair, deployment.pair)
            deployment = deployment.model_copy(update={"pair": pair})
            if self.deployment.same(deployment):
                described = self.deployment.described_as(deployment)
                self.deployment = await asyncio.to_thread(self.servers[0].as_certified, described)
            else:
                await asyncio.to_thread(check_deployable, self.deployment, deployment, True)
                self._switch(await self._load_beside(deployment))
            await asyncio.to_thread(self.operation.keep, self.deployment)
            return self.deployment

    async def roll_back(self) -> Deployment:
        """Serve again what was served before. Raises :class:`UserError` where nothing was."""
        if self.previous is None:
            raise UserError("nothing was served before this configuration")
        return await self.deploy(self.previous)

    async def try_out(self, deployment: Deployment, share: float) -> Deployment:
        raise UserError(
            "a canary compares engines of this library: deploy the configuration, and go back with"
            " `specdec deploy --back`"
        )

    def _load(self, deployment: Deployment) -> list[ExternalServer]:
        """Servers with a deployment. Raises :class:`UserError`; then none remains."""
        servers = self._made(deployment)
        try:
            _start(servers)
        except BaseException:
            _close(servers)
            raise
        return servers

    async def _load_beside(self, deployment: Deployment) -> list[ExternalServer]:
        """The same while the present servers answer. A thread cannot be cancelled: closing the
        servers ends it."""
        servers = self._loading = self._made(deployment)
        try:
            await asyncio.to_thread(_start, servers)
        except BaseException:
            await asyncio.to_thread(_close, servers)
            raise
        finally:
            self._loading = []
        return servers

    def _made(self, deployment: Deployment) -> list[ExternalServer]:
        return [
            ExternalServer(str(number), program, deployment)
            for number, program in enumerate(self.programs)
        ]

    def _switch(self, servers: list[ExternalServer]) -> None:
        old, self.servers = self.servers, servers
        self.previous, self.deployment = self.deployment, servers[0].deployment
        self.switches += 1
        for server in old:
            self._tasks[server].cancel()
            self._tasks[server] = asyncio.create_task(self._drain(server))
        self._follow(servers)

    async def _drain(self, server: ExternalServer) -> None:
        while server.running:
            await asyncio.sleep(_DRAINED)
        await asyncio.to_thread(server.close)
        del self._tasks[server]

    # Processes that end.

    def _follow(self, servers: Sequence[ExternalServer]) -> None:
        for server in servers:
            watching = every(_WATCH, partial(self._look_at, server))
            self._tasks[server] = asyncio.create_task(watching)

    async def _look_at(self, server: ExternalServer) -> None:
        """Start a server again that does not work."""
        if (reason := await self._failure(server)) is None:
            return
        server.url = None
        logger.warning("server %s is started again: %s", server.name, reason)
        while server.url is None:
            await asyncio.sleep(server.pause)
            self.restarts += 1
            try:
                await asyncio.to_thread(server.restart)
            except UserError as error:
                logger.error("%s", error)

    async def _failure(self, server: ExternalServer) -> str | None:
        """Why a server does not work: it has ended, does not answer, or has requests and counts no
        tokens, as a front end may answer while its engine hangs."""
        if (ended := server.failed()) is not None:
            return ended
        if server.idle > self.patience:
            return f"it has requests, and counts no token for over {self.patience:g} s"
        with suppress(httpx.HTTPError):
            if (await self.http.get(f"{server.url}/health", timeout=self.patience)).is_success:
                return None
        return server.failed() or f"its /health fails, or takes over {self.patience:g} s"

    # What the servers say.

    async def pages(self) -> dict[str, str]:
        """The metrics of each server that answers, by the replica's name."""
        servers = self.working
        pages = await asyncio.gather(*map(self._page, servers))
        named = zip(servers, pages, strict=True)
        return {server.name: page for server, page in named if page is not None}

    async def _page(self, server: ExternalServer) -> str | None:
        key = {"authorization": f"Bearer {server.key}"}
        with suppress(httpx.HTTPError):
            answer = await self.http.get(f"{server.url}/metrics", headers=key, timeout=_LOOK)
            return answer.text if answer.is_success else None
        return None

    async def _look_at_metrics(self) -> None:
        """Follow the tokens that each server counts, and the share of candidates that was accepted
        since the last look."""
        drafted = accepted = 0.0
        servers = self.servers
        pages = await self.pages()
        for server in servers:
            sums = _sums(pages.get(server.name, ""))
            drafted += sums.get(CANDIDATES, 0.0)
            accepted += sums.get(ACCEPTED, 0.0)
            server.has_counted(tuple(sums[name] for name in _TOKENS if name in sums))
        before, self._counted = self._counted, (drafted, accepted)
        if drafted > before[0] and accepted >= before[1]:  # else a server has begun anew
            share = (accepted - before[1]) / (drafted - before[0])
            self.drift.accepted(self.deployment.configuration, min(share, 1.0))


def _sums(page: str) -> dict[str, float]:
    """The sum of the samples of each name, without its prefix, in a page of metrics."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def _start(servers: Sequence[ExternalServer]) -> None:
    """Start servers side by side. Raises :class:`UserError` where one does not start."""
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(ExternalServer.start, servers))


def _close(servers: Sequence[ExternalServer], *patience: float) -> None:
    """End servers for good, side by side, each as :meth:`ExternalServer.close` does."""
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: server.close(*patience), servers))
