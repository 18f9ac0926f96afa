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
        self._restarting: dict[ExternalServer, asyncio.Task[None]] = {}
        self._draining: dict[ExternalServer, asyncio.Task[None]] = {}
        self._looking: dict[ExternalServer, asyncio.Task[None]] = {}
        self._loading: list[ExternalServer] = []
        self._counted = (0.0, 0.0)

    async def __aenter__(self) -> ExternalFleet:
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.AsyncClient(limits=unlimited, timeout=None, trust_env=False)
        self._tasks = [
            asyncio.create_task(every(_WATCH, self._watch)),
            asyncio.create_task(every(_LOOK, self._look_at_metrics)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        named = (self._looking, self._restarting, self._draining)
        for task in (*self._tasks, *(task for tasks in named for task in tasks.values())):
            task.cancel()
        await self.http.aclose()

    def end(self) -> None:
        """End all processes, within a second."""
        _close([*self.servers, *self._draining, *self._loading], _AT_THE_END)

    @property
    def slots(self) -> int:
        return sum(program.slots for program in self.programs)

    @property
    def running(self) -> int:
        """Requests that pass through."""
        return sum(server.running for server in (*self.servers, *self._draining))

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

    def lost(self, server: ExternalServer) -> None:
        """A connection to the server has broken: look at its process now, not in a second."""
        if (reason := server.failed()) is not None:
            self._restart(server, reason)

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
            if (restarting := self._restarting.pop(server, None)) is not None:
                restarting.cancel()
            self._draining[server] = asyncio.create_task(self._drain(server))

    async def _drain(self, server: ExternalServer) -> None:
        while server.running:
            await asyncio.sleep(_DRAINED)
        await asyncio.to_thread(server.close)
        del self._draining[server]

    # Processes that end.

    async def _watch(self) -> None:
        """Look at each server, beside those that have not answered yet."""
        for server in self.servers:
            if server not in self._restarting and server not in self._looking:
                looking = self._looking[server] = asyncio.create_task(self._look_at(server))
                looking.add_done_callback(partial(self._looked, server))

    def _looked(self, server: ExternalServer, _: asyncio.Task[None]) -> None:
        del self._looking[server]

    async def _look_at(self, server: ExternalServer) -> None:
        """Restart a server that has ended, does not answer, or has requests and does not work: a
        front end may answer while its engine hangs."""
        reason = server.failed()
        if reason is None and server.idle > self.patience:
            reason = f"it has requests, and counts no token for over {self.patience:g} s"
        if reason is None:
            url = f"{server.url}/health"
            with suppress(httpx.HTTPError):
                if (await self.http.get(url, timeout=self.patience)).is_success:
                    return
            reason = server.failed() or f"its /health fails, or takes over {self.patience:g} s"
        self._restart(server, reason)

    def _restart(self, server: ExternalServer, reason: str) -> None:
        """Start a server again, unless that is under way."""
        if server not in self._restarting and server in self.servers:
            server.url = None
            logger.warning("server %s is started again: %s", server.name, reason)
            self._restarting[server] = asyncio.create_task(self._restarted(server))

    async def _restarted(self, server: ExternalServer) -> None:
        try:
            while True:
                await asyncio.sleep(server.pause)
                self.restarts += 1
                try:
                    await asyncio.to_thread(server.restart)
                    return
                except UserError as error:
                    logger.error("%s", error)
        finally:
            self._restarting.pop(server, None)

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
