"""An engine in a separate process, so that HTTP work never delays its steps.

In one process the event loop and the engine compete for Python's interpreter lock, which costs the
engine milliseconds a step. The engine's process steps as long as it has requests, and sends what
each step adds over a connection (:mod:`specdec_core.base.wire`) on which both ends prove a key.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from time import monotonic
from typing import Any, Protocol

import psutil

from cluster.serving.engine_main import (
    LARGEST,
    EngineAnswer,
    EngineLink,
    EngineRaised,
    EngineReady,
    EngineStepped,
)
from specdec_core.base.wire import LinkLost, WireListener
from specdec_core.config import Configuration, PairSpec
from specdec_core.engine import Chunk, Request
from specdec_core.engine.engine import EngineStatus
from specdec_core.engine.scheduler import Limits
from specdec_core.models.loading import load_skeleton, load_tokenizer
from specdec_core.models.pair import Pair

_COMMAND = "from cluster.serving.engine_main import main; main()"
_ENDED = "the engine's process has ended"
_ENDING = 5.0  # seconds for the process to end after its connection is closed
_START = 1200.0  # seconds in which it loads its models, and may compile graphs
_LOOK = 0.1  # seconds between checks whether a process that starts is alive
STEP = 300.0  # seconds that a step may take


class Process(Protocol):
    """What is used of a :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> int | None: ...


class Host:
    """Where an engine's process is started: here, as a child of this process. A subclass starts it
    on another node (:mod:`cluster.serving.hosts`)."""

    address = "127.0.0.1"  # of this process, for the engine's
    exclusive = False  # whether it runs one engine at a time

    def start(self, port: int, key: bytes) -> Process:
        """Start a process that connects to `port` of :attr:`address`."""
        return start_process(self.address, port, key)

    def memory(self, process: Process) -> float:
        """MiB that the process holds, where that is known."""
        if process.poll() is not None:
            return 0.0
        return psutil.Process(process.pid).memory_info().rss / 2**20

    async def wait(self) -> None:
        """Wait until processes can be started, in no thread: that may be never. Raises
        :class:`RuntimeError` if they cannot."""

    def close(self) -> None:
        """Give back what it holds."""


HERE = Host()


def start_process(host: str, port: int, key: bytes) -> subprocess.Popen[bytes]:
    """Start an engine's process, a child of this one, that connects to the address."""
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, host, str(port)],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(key)
    return process


class EngineProcess:
    """What serving needs of an :class:`Engine`, which runs in another process, started by `host`.

    Requests are added and cancelled from any thread at any time. Everything else is called by one
    thread. A process that sends nothing for `patience` seconds while a message is awaited is
    killed; one that compiles graphs, which it may do at any step, has as long as for its start.
    When this process ends, in whatever way, the engine's process ends.

    Raises:
        UserError: the pair or the configuration cannot be used.
    """

    def __init__(
        self,
        spec: PairSpec,
        configuration: Configuration,
        limits: Limits,
        cores: Sequence[int] = (),
        patience: float = STEP,
        host: Host = HERE,
    ) -> None:
        self.configuration, self.slots, self.host = configuration, limits.slots, host
        self._given = limits, tuple(cores), patience
        self._stepped: deque[EngineStepped] = deque()  # received while an answer was awaited
        self._unfinished: set[str] = set()
        self._link = self._connected(patience)
        self._send((spec, configuration, limits, tuple(cores)))
        ready = self._receive()
        assert isinstance(ready, EngineReady)
        self.max_length, self.vocab_size = ready.max_length, ready.vocab_size
        self._status = ready.status
        self._link.patience = max(patience, _START) if ready.spec.runner.compile else patience
        skeleton = load_skeleton(spec.target)
        self.pair = Pair(ready.spec, load_tokenizer(spec.target), skeleton)
        drafter = configuration.drafter
        keeps = drafter is not None and drafter.keeps_state
        self.learned = RemoteMemory(self) if keeps else None

    def another(self, spec: PairSpec, configuration: Configuration) -> EngineProcess:
        """A process like this one on the same host, for another pair or configuration. Raises
        :class:`UserError` where they cannot be used."""
        return EngineProcess(spec, configuration, *self._given, self.host)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def memory(self) -> float:
        """MiB that the process holds; 0 once it has ended."""
        return self.host.memory(self._process)

    @property
    def idle(self) -> bool:
        """See :attr:`Engine.idle`."""
        return not self._unfinished

    def status(self) -> EngineStatus:
        """See :meth:`Engine.status`; as of the last step. The last requests may have been cancelled
        since."""
        return replace(self._status, waiting=0, cache_usage=0.0) if self.idle else self._status

    def add(self, request: Request) -> None:
        """See :meth:`Engine.add`."""
        request.check(self.max_length, self.vocab_size)
        self._unfinished.add(request.id)
        self._send(("add", request))

    def cancel(self, request_id: str) -> None:
        """See :meth:`Engine.cancel`."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            if self.alive:
                with suppress(RuntimeError):  # it has just ended
                    self._send(("cancel", request_id))

    def step(self) -> list[Chunk]:
        """See :meth:`Engine.step`; waits for the next one. Raises what the engine raised."""
        stepped = self._stepped.popleft() if self._stepped else self._receive()
        assert isinstance(stepped, EngineStepped)
        self._status = stepped.status
        self._unfinished -= {chunk.request_id for chunk in stepped.chunks if chunk.finished}
        return stepped.chunks

    def ask(self, name: str, *arguments: Any) -> Any:
        """The result of the method `name` of what the drafter has learned, called between two
        steps. Raises :class:`UserError` as the method does."""
        self._send((name, arguments))
        while not isinstance(message := self._receive(), EngineAnswer):
            self._stepped.append(message)
        return message.value

    def close(self) -> None:
        """End the process."""
        self._link.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_ENDING)

    def _connected(self, patience: float) -> EngineLink:
        """Start the process and wait until it has connected."""
        listener = WireListener(self.host.address, LARGEST, patience=ceil(patience))
        try:
            self._process = self.host.start(listener.port, listener.key)
            end = monotonic() + _START
            while (wire := listener.accept(_LOOK)) is None:
                if not self.alive:
                    raise RuntimeError(_ENDED)
                if monotonic() > end:
                    self._process.kill()
                    raise RuntimeError("the engine's process did not connect")
        finally:
            listener.close()
        return EngineLink(wire, _START)

    def _send(self, message: Any) -> None:
        try:
            self._link.send(message)
        except LinkLost:
            self._process.kill()  # should it hang
            raise RuntimeError(_ENDED) from None

    def _receive(self) -> Any:
        try:
            message = self._link.recv()
        except LinkLost:
            self._process.kill()
            raise RuntimeError(_ENDED) from None
        except TimeoutError:
            self._process.kill()
            self._process.wait(_ENDING)
            raise RuntimeError(
                f"the engine's process gave no sign for {self._link.patience:g} s and was ended"
            ) from None
        if isinstance(message, EngineRaised):
            raise message.error
        return message


class RemoteMemory:
    """What the drafter of an engine's process has learned; see
    :class:`specdec_core.drafting.states.DrafterMemory`. Its methods are called in that process."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return partial(self._engine.ask, name)
