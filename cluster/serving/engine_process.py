"""An engine in a process of its own, so that answering HTTP never keeps it waiting.

In one process the event loop and the engine take turns at Python's interpreter lock, which costs
the engine milliseconds a step. Here the engine steps as long as it has requests, and sends what
each step adds through a pipe.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch

from cluster.serving.keeper import end_with_parent
from specdec_core.base.errors import UserError
from specdec_core.base.memory import resident
from specdec_core.config import Configuration, PairSpec
from specdec_core.engine import Chunk, Engine, Request
from specdec_core.engine.engine import EngineStatus
from specdec_core.engine.scheduler import Limits
from specdec_core.models.loading import load_skeleton, load_tokenizer
from specdec_core.models.pair import Pair, load_pair
from specdec_core.models.reading import reason

_COMMAND = "from cluster.serving.engine_process import main; main()"
_ENDED = "the engine's process has ended"
_GONE, _COMPILED = "gone", "compiled"  # beside what the other process says
_ENDING = 5.0  # seconds that the process may take to end by itself
_START = 1200.0  # seconds in which it loads its models, and may compile graphs
STEP = 300.0  # seconds that a step may take

COMPILERS = ThreadPoolExecutor(2, "grammars")  # of grammars, beside the steps


class _Ready(NamedTuple):
    spec: PairSpec  # with its device and data types resolved
    max_length: int
    vocab_size: int
    status: EngineStatus


class _Stepped(NamedTuple):
    chunks: list[Chunk]
    status: EngineStatus


class _EngineAnswer(NamedTuple):
    value: Any


class _Failed(NamedTuple):
    error: Exception


class EngineProcess:
    """What serving needs of an :class:`Engine`, which runs in another process.

    Requests are taken, and cancelled, from any thread and at any time. Everything else is called by
    one thread. A process that gives no sign for `patience` seconds while it is waited for is ended;
    one that compiles graphs, which it may do at any step, has as long as for its start. Leaving the
    process, however it ends, ends the engine's.

    Raises:
        UserError: the pair or the configuration cannot be used.
    """

    elsewhere = True

    def __init__(
        self,
        spec: PairSpec,
        configuration: Configuration,
        limits: Limits,
        cores: Sequence[int] = (),
        patience: float = STEP,
    ) -> None:
        self.configuration, self.slots = configuration, limits.slots
        self.limits = limits.verifying(configuration.candidates)
        self._given = spec, tuple(cores), patience
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._wait_at_most(_START)
        self._stepped: deque[_Stepped] = deque()  # received while waiting for an answer
        self._unfinished: set[str] = set()
        self._sending = Lock()  # a message is sent whole before another thread's
        self._send((spec, configuration, limits, tuple(cores)))
        ready = self._receive()
        assert isinstance(ready, _Ready)
        self.max_length, self.vocab_size = ready.max_length, ready.vocab_size
        self._status = ready.status
        self._wait_at_most(max(patience, _START) if ready.spec.runner.compile else patience)
        skeleton = load_skeleton(spec.target)
        self.pair = Pair(ready.spec, load_tokenizer(spec.target), skeleton)
        self.drafter = None if configuration.drafter is None else _Drafter(self)

    def another(
        self, spec: PairSpec | None = None, configuration: Configuration | None = None
    ) -> EngineProcess:
        """A process like this one, for another pair or configuration where given. Raises
        :class:`UserError` where they cannot be used."""
        own, cores, patience = self._given
        configuration = configuration or self.configuration
        return EngineProcess(spec or own, configuration, self.limits, cores, patience)

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    @property
    def memory(self) -> float:
        """MiB that the process holds; 0 once it has ended."""
        return resident(self._process.pid) if self.alive else 0.0

    def encode(self, text: str) -> tuple[int, ...]:
        """See :meth:`Engine.encode`."""
        return tuple(self.pair.tokenizer(text)["input_ids"])

    @property
    def idle(self) -> bool:
        """See :attr:`Engine.idle`."""
        return not self._unfinished

    def status(self) -> EngineStatus:
        """See :meth:`Engine.status`; as of the last step. After it the last requests may have been
        cancelled."""
        return replace(self._status, waiting=0, cache_usage=0.0) if self.idle else self._status

    def add(self, request: Request) -> None:
        """See :meth:`Engine.add`."""
        request.check(self.max_length, self.vocab_size, self.limits)
        self._unfinished.add(request.id)
        self._send(("add", request))

    def cancel(self, request_id: str) -> None:
        """See :meth:`Engine.cancel`."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            if not self.alive:
                return
            self._send(("cancel", request_id))

    def step(self) -> list[Chunk]:
        """See :meth:`Engine.step`; waits for the next one. Raises what the engine raised."""
        stepped = self._stepped.popleft() if self._stepped else self._receive()
        assert isinstance(stepped, _Stepped)
        self._status = stepped.status
        self._unfinished -= {chunk.request_id for chunk in stepped.chunks if chunk.finished}
        return stepped.chunks

    def ask(self, name: str, *arguments: Any) -> Any:
        """The result of the drafter's method `name`, called between two steps."""
        self._send((name, arguments))
        while not isinstance(message := self._receive(), _EngineAnswer):
            self._stepped.append(message)
        return message.value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_ENDING)

    def _wait_at_most(self, seconds: float) -> None:
        """No wait for the process, to send to it or to receive, is longer."""
        self._patience = seconds
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.fromfd(self._pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _lost(self, error: Exception) -> RuntimeError:
        """What this error at the pipe means; the process has ended then."""
        if not isinstance(error, BlockingIOError):
            return RuntimeError(_ENDED)
        self._process.kill()
        self._process.wait(_ENDING)
        return RuntimeError(
            f"the engine's process gave no sign for {self._patience:g} s and was ended"
        )

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._pipe.send(message)
        except OSError as error:
            raise self._lost(error) from None

    def _receive(self) -> Any:
        try:
            message = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost(error) from None
        if isinstance(message, _Failed):
            raise message.error
        return message


class _Drafter:
    """What the engine's drafter has learned; see :class:`specdec_core.drafting.drafter.Drafter`."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def state(self) -> dict[str, Any] | None:
        state: dict[str, Any] | None = self._engine.ask("state")
        return state

    def load(self, state: dict[str, Any], source: str = "the state") -> None:
        if (error := self._engine.ask("load", state, source)) is not None:
            raise UserError(error)

    def absorb(self, gain: Mapping[str, Any]) -> None:
        self._engine.ask("absorb", gain)

    def learned(self) -> list[dict[str, Any]] | None:
        rows: list[dict[str, Any]] | None = self._engine.ask("learned")
        return rows


def _run(pipe: Connection) -> None:
    """Decode what comes through the pipe, until its other end is gone."""
    spec, configuration, limits, cores = pipe.recv()
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        pair = load_pair(spec)
        engine = Engine(pair, configuration, limits=limits)
    except UserError as error:
        pipe.send(_Failed(error))
        return
    except Exception as error:
        pipe.send(_Failed(RuntimeError(f"the engine did not start: {reason(error)}")))
        raise
    torch.set_num_threads(pair.spec.runner.threads)
    pipe.send(_Ready(pair.spec, engine.max_length, engine.vocab_size, engine.status()))
    inbox = _Inbox(engine, pipe)
    while True:
        while engine.idle or inbox.filled:
            inbox.handle()
        try:
            chunks = engine.step()
        except Exception as error:
            pipe.send(_Failed(RuntimeError(repr(error))))
            raise
        pipe.send(_Stepped(chunks, engine.status()))


class _Inbox:
    """What comes through the pipe. A request with a grammar is added to the engine once that is
    compiled; steps, and other requests, do not wait for it."""

    def __init__(self, engine: Engine, pipe: Connection) -> None:
        self._engine, self._pipe = engine, pipe
        self._messages: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._compiling: set[str] = set()  # requests
        Thread(target=self._receive, name="inbox", daemon=True).start()

    @property
    def filled(self) -> bool:
        return not self._messages.empty()

    def handle(self) -> None:
        """Do what the next message says; waits for one. Raises :class:`EOFError` once the other end
        of the pipe is gone."""
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
            # Who waits for a step must not wait for one that does not come.
            self._pipe.send(_Stepped([], engine.status()))
        else:
            assert engine.drafter is not None
            try:
                self._pipe.send(_EngineAnswer(getattr(engine.drafter, name)(*argument)))
            except UserError as error:
                self._pipe.send(_EngineAnswer(str(error)))

    def _receive(self) -> None:
        try:
            while True:
                self._messages.put(self._pipe.recv())
        except (EOFError, OSError):
            self._messages.put((_GONE, None))

    def _compiled(self, request: Future[Request]) -> None:
        self._messages.put((_COMPILED, request))


def main() -> None:
    """The engine's process; the pipe's file descriptor is its argument."""
    # Ctrl-C reaches every process of a terminal; this one ends with its owner.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    try:
        _run(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)
