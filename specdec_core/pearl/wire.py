"""A link over a socket, and the draft's process at its other end.

Messages are pickled: both ends prove that they know a key before anything is unpickled.
"""

from __future__ import annotations

import gc
import marshal
import os
import pickle
import secrets
import select
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from struct import Struct
from time import perf_counter
from typing import Any

from specdec_core.pair import Pair
from specdec_core.pearl.ahead import Ahead
from specdec_core.pearl.link import LinkLost
from specdec_core.pearl.messages import Drafted

_LENGTH = Struct("!I")
_TIMEVAL = Struct("@ll")
_CHUNK = 1 << 20
_TOKENS, _ANY = b"t", b"p"  # how a message is written
_PATIENCE = 5  # seconds after which one that does not read, or answer a challenge, counts as gone
# Clocks further apart than this are different clocks: processes of one machine share one.
_SAME_CLOCK = 0.05  # seconds


class Wire:
    """Whole messages over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._read = connected, bytearray()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def send(self, message: Any) -> None:
        """Raises :class:`LinkLost` where nobody is at the other end."""
        data = _encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise LinkLost(str(error)) from error

    def receive(self, timeout: float | None = 0.0) -> list[Any]:
        """What has come; waits up to `timeout` seconds (None: for ever) for the first of it. Raises
        :class:`LinkLost` when all has been said and the other end is gone."""
        if not (found := list(self._arrived())) and timeout != 0:
            self._poll.poll(None if timeout is None else 1e3 * timeout)
            found = list(self._arrived())
        return found

    def close(self) -> None:
        self._socket.close()

    def _arrived(self) -> Iterator[Any]:
        try:
            while data := self._socket.recv(_CHUNK, socket.MSG_DONTWAIT):
                self._read += data
                if len(data) < _CHUNK:
                    break
            gone = not data
        except BlockingIOError:
            gone = False
        except OSError as error:
            raise LinkLost(str(error)) from error
        while len(self._read) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._read)
            end = _LENGTH.size + length
            if len(self._read) < end:
                break
            message = _decode(self._read[_LENGTH.size : end])
            del self._read[:end]
            yield message
        if gone:
            raise LinkLost("the other end has closed")


def _encode(message: Any) -> bytes:
    # By far the most frequent: many come while the target is busy, and are read in its time.
    if isinstance(message, Drafted):
        return _TOKENS + marshal.dumps(tuple(message))
    return _ANY + pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _decode(data: bytearray) -> Any:
    content = memoryview(data)[1:]
    return Drafted._make(marshal.loads(content)) if data[:1] == _TOKENS else pickle.loads(content)


class WireLink:
    """A :class:`specdec_core.pearl.link.Link` that drafts connect to: at `port`, if they know the
    `key`. When one is lost, the next one that comes takes its place."""

    def __init__(self, host: str = "") -> None:
        self.key = secrets.token_bytes(32)
        self.number, self.configured, self.offset = 0, None, 0.0
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._coming = select.poll()
        self._coming.register(self._listener, select.POLLIN)
        self._wire: Wire | None = None

    @property
    def connected(self) -> bool:
        return self._wire is not None

    def send(self, message: Any) -> None:
        if self._wire is not None:
            try:
                self._wire.send(message)
            except LinkLost:
                self._lose()

    def receive(self, timeout: float = 0.0) -> list[Any]:
        if self._wire is None and not self._meet(timeout):
            return []
        found: list[Any] = []
        try:
            found = self._wire.receive(timeout)
        except LinkLost:
            self._lose()
        return found

    def wait(self, timeout: float) -> bool:
        """Whether a draft is there, within so many seconds."""
        return self._wire is not None or self._meet(timeout)

    def close(self) -> None:
        self._lose()
        self._listener.close()

    def _lose(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = self.configured = None

    def _meet(self, timeout: float) -> bool:
        """Let a draft in that has come, or comes within so many seconds."""
        if not self._coming.poll(1e3 * timeout):
            return False
        come, _ = self._listener.accept()
        try:
            _prove(come, self.key, first=True)
            wire = Wire(come)
            (clock,) = wire.receive(_PATIENCE)
        except (OSError, EOFError, AuthenticationError, ValueError):
            come.close()
            return False
        apart = perf_counter() - clock
        self.offset = apart if abs(apart) > _SAME_CLOCK else 0.0
        self._wire, self.configured, self.number = wire, None, self.number + 1
        return True


def serve(host: str, port: int, key: bytes, pair: Pair) -> None:
    """Draft for the engine at that address until it is gone. Raises :class:`LinkLost` where it
    cannot be reached."""
    try:
        connected = socket.create_connection((host, port), timeout=_PATIENCE)
        _prove(connected, key, first=False)
    except (OSError, EOFError, AuthenticationError) as error:
        raise LinkLost(f"no engine at {host}:{port}: {error}") from error
    with closing(Wire(connected)) as wire, suppress(LinkLost):
        wire.send(perf_counter())
        ahead = Ahead(pair, wire.send, wire.receive, salt=secrets.token_hex(8))
        # What is loaded by now stays: no target shall wait for it to be looked through.
        gc.collect()
        gc.freeze()
        while True:
            for message in wire.receive(0.0 if ahead.busy else None):
                ahead.handle(message)
            ahead.draft()


def _prove(connected: socket.socket, key: bytes, first: bool) -> None:
    """Each end challenges the other, the engine (`first`) first; raises where an answer is
    wrong."""
    connected.settimeout(None)  # the system's own limits, which leave a peek without waiting alone
    # An engine may be busy for long before it lets a draft in; it never waits for one itself.
    for way in (socket.SO_SNDTIMEO, *([socket.SO_RCVTIMEO] if first else [])):
        connected.setsockopt(socket.SOL_SOCKET, way, _TIMEVAL.pack(_PATIENCE, 0))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    steps = (deliver_challenge, answer_challenge)
    with Connection(os.dup(connected.fileno())) as connection:
        for step in steps if first else reversed(steps):
            step(connection, key)
