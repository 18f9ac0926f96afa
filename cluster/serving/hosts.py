"""Engines on devices that Ray finds: a Ray actor on any node holds those of a replica."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from subprocess import Popen, TimeoutExpired
from time import monotonic
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from cluster.placed_engine import placed_engine
from cluster.placement import release
from cluster.serving.engine_main import connected, decode
from cluster.serving.engine_process import Host, Process, start_process
from cluster.session import listening_address, start_actor
from specdec_core.base.keeper import end_with_parent
from specdec_core.base.wire import LinkLost
from specdec_core.config import Placement

_ENGINES = 16  # of a replica at the same time: most of them finish their requests
_AGAIN = 60.0  # seconds in which Ray starts a holder again where there are devices
_LOOK = 0.1  # seconds between looks whether it has


class EngineHolder:
    """Holds a replica's devices, and starts engines on them. With a `placement` the engine is in
    this process, and its models have devices of their own."""

    def __init__(self, placement: Placement | None) -> None:
        end_with_parent()
        self._placement = placement
        self._processes: dict[int, Popen[bytes]] = {}

    def ready(self) -> str:
        """The id of this actor, once its process runs."""
        return ray.get_runtime_context().get_actor_id() or ""

    def run(self, engine: int, host: str, port: int, key: bytes) -> None:
        """Run an engine for the server at that address until it ends."""
        if self._placement is not None:
            with suppress(EOFError, LinkLost):
                load = partial(placed_engine, placement=self._placement)
                decode(connected(host, port, key), load)
            return
        self._processes[engine] = process = start_process(host, port, key)
        process.wait()
        del self._processes[engine]

    def kill(self, engine: int) -> None:
        """End an engine's process at once."""
        if (process := self._processes.get(engine)) is not None:
            process.kill()


class DeviceHost(Host):
    """Starts engines where Ray has the devices that a replica `needs`, or, with a `placement`, the
    devices of that."""

    def __init__(self, needs: dict[str, float], placement: Placement | None = None) -> None:
        self.exclusive = placement is not None
        self._numbers, self._id = count(), ""  # the holder's, once it runs
        self._actor = start_actor(
            EngineHolder,
            placement,
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            max_concurrency=_ENGINES,
            max_restarts=-1,
        )

    def start(self, port: int, key: bytes) -> Process:
        return _HeldProcess(
            self._actor, self.exclusive, next(self._numbers), self.address, port, key
        )

    def memory(self, process: Process) -> float:
        return 0.0  # it may be on another node

    async def wait(self) -> None:
        end = monotonic() + _AGAIN
        while True:
            try:
                self._id = await self._actor.ready.remote()
                break
            except RayError as error:
                # Ray refuses calls of a holder that it starts again.
                if not isinstance(error, ActorUnavailableError) or monotonic() > end:
                    raise RuntimeError(f"its devices are lost: {error}") from None
                await asyncio.sleep(_LOOK)
        # Known once the holder has a node. Ray answers in a moment, but keeps its caller waiting.
        self.address = await asyncio.to_thread(listening_address)

    def close(self) -> None:
        ray.kill(self._actor)
        if self._id:
            release(self._id)


class _HeldProcess:
    """An engine's process, which a holder runs."""

    def __init__(self, actor: Any, exclusive: bool, number: int, *address: Any) -> None:
        self._actor, self._exclusive, self.pid = actor, exclusive, number
        self._end: Future[None] = actor.run.remote(number, *address).future()

    def poll(self) -> int | None:
        return 0 if self._end.done() else None

    def kill(self) -> None:
        if self._exclusive:  # it is the holder, which Ray starts again
            ray.kill(self._actor, no_restart=False)
        else:
            self._actor.kill.remote(self.pid)

    def wait(self, timeout: float) -> int | None:
        try:
            self._end.exception(timeout)  # also that of a holder that is gone
        except TimeoutError:
            raise TimeoutExpired("engine", timeout) from None
        return 0
