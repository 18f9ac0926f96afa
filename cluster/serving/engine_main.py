"""The process of an engine: it decodes the requests of a server, and sends what each step adds."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, NamedTuple

import torch

from specdec_core.base.errors import UserError
from specdec_core.base.keeper import end_with_parent
from specdec_core.base.wire import LinkLost, Wire, connect
from specdec_core.config import Configuration, PairSpec
from specdec_core.engine import Chunk, Engine, Request
from specdec_core.engine.engine import EngineStatus
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import load_pair
from specdec_core.models.reading import reason
from specdec_core.tokens.grammar import COMPILERS

LARGEST = 1 << 30  # bytes of a message: log-probabilities of a long prompt are many

_GONE, _COMPILED = "gone", "compiled"  # in the inbox, beside the server's messages


class EngineReady(NamedTuple):
    spec: PairSpec  # with its device and data types resolved
    max_length: int
    vocab_size: int
    status: EngineStatus


class EngineStepped(NamedTuple):
    chunks: list[Chunk]
    status: EngineStatus


class EngineAnswer(NamedTuple):
    value: Any


class EngineRaised(NamedTuple):
    error: Exception


class EngineLink:
    """Python objects over a wire. :meth:`recv` waits for at most `patience` seconds, if given."""

    def __init__(self, wire: Wire, patience: float | None = None) -> None:
        self._wire, self.patience = wire, patience
        self._arrived: deque[bytearray] = deque()
        self._sending = Lock()  # messages keep their order among threads

    def send(self, message: Any) -> None:
        """Raises :class:`LinkLost`."""
        data = pickle.dumps(message)
        with self._sending:
            self._wire.send(data)

    def recv(self) -> Any:
        """The next object. Raises :class:`LinkLost`, and :class:`TimeoutError`."""
        end = None if self.patience is None else monotonic() + self.patience
        while not self._arrived:
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._arrived += self._wire.receive(left)
        return pickle.loads(self._arrived.popleft())

    def close(self) -> None:
        self._wire.close()


@contextmanager
def _loaded(spec: PairSpec, configuration: Configuration, limits: Limits) -> Iterator[Engine]:
    yield Engine(load_pair(spec), configuration, limits=limits)


Load = Callable[[PairSpec, Configuration, Limits], AbstractContextManager[Engine]]


def connected(host: str, port: int, key: bytes) -> EngineLink:
    """A link to the engine's server. Raises :class:`LinkLost`."""
    return EngineLink(connect(host, port, key, LARGEST, patience=None))


def decode(link: EngineLink, load: Load = _loaded) -> None:
    """Decode the requests that come over the link, by an engine that `load` makes. Ends with
    :class:`EOFError` or :class:`LinkLost` when the other end is gone."""
    spec, configuration, limits, cores = link.recv()
    with ExitStack() as stack:
        try:
            if cores:
                os.sched_setaffinity(0, cores)
            engine = stack.enter_context(load(spec, configuration, limits))
        except UserError as error:
            link.send(EngineRaised(error))
            return
        except Exception as error:
            link.send(EngineRaised(RuntimeError(f"the engine did not start: {reason(error)}")))
            raise
        _decode(link, engine)


def _decode(link: EngineLink, engine: Engine) -> None:
    torch.set_num_threads(engine.pair.spec.runner.threads)
    link.send(EngineReady(engine.pair.spec, engine.max_length, engine.vocab_size, engine.status()))
    inbox = _Inbox(engine, link)
    while True:
        while engine.idle or inbox.filled:
            inbox.handle()
        try:
            chunks = engine.step()
        except Exception as error:
            link.send(EngineRaised(RuntimeError(repr(error))))
            raise
        link.send(EngineStepped(chunks, engine.status()))


class _Inbox:
    """The messages that come over the link. A request with a grammar is added to the engine once
    that is compiled; steps and other requests do not wait for it."""

    def __init__(self, engine: Engine, link: Any) -> None:
        self._engine, self._link = engine, link
        self._messages: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._compiling: set[str] = set()  # requests
        Thread(target=self._receive, name="inbox", daemon=True).start()

    @property
    def filled(self) -> bool:
        return not self._messages.empty()

    def handle(self) -> None:
        """Act on the next message; waits for one. Raises :class:`EOFError` once the other end is
        gone."""
        name, argument = self._messages.get()
        engine = self._engine
        if name == _GONE:
            raise EOFError
        elif name == "add" and argument.grammar is not None:
            self._compiling.add(argument.id)
            COMPILERS.submit(engine.prepared, argument).add_done_callback(self._compiled)
        elif name == "add":
            engine.add(argument)
        elif name == _COMPILED:
            request = argument.result()
            if request.id in self._compiling:  # else it was cancelled
                self._compiling.discard(request.id)
                engine.add(request)
        elif name == "cancel":
            self._compiling.discard(argument)
            engine.cancel(argument)
            # The other end may await a step that no longer comes.
            self._link.send(EngineStepped([], engine.status()))
        else:
            # A method of what the drafter has learned.
            try:
                self._link.send(EngineAnswer(getattr(engine.learned, name)(*argument)))
            except UserError as error:
                self._link.send(EngineRaised(error))

    def _receive(self) -> None:
        try:
            while True:
                self._messages.put(self._link.recv())
        except (EOFError, OSError):
            self._messages.put((_GONE, None))

    def _compiled(self, request: Future[Request]) -> None:
        self._messages.put((_COMPILED, request))


def main() -> None:
    """The engine's process. Its arguments are the address of its server, its input is the key."""
    # Ctrl-C reaches every process of a terminal; this one ends with its server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    host, port = sys.argv[1:]
    try:
        decode(connected(host, int(port), sys.stdin.buffer.read()))
    except (EOFError, LinkLost):
        os._exit(0)  # the interpreter's own end takes a second, in which the devices are not free
