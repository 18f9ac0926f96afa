"""Whole messages over a socket, between processes that share a key.

Messages are pickled by default. This is safe because both ends prove that they know the key before
anything is read.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from struct import Struct
from typing import Any

_LENGTH = Struct("!Q")
_TIMEVAL = Struct("@ll")
_CHUNK = 1 << 20
PATIENCE = 5  # seconds after which an end that does not read or answer a challenge counts as lost
# A machine that is lost closes nothing, so TCP probes it: seconds between probes, and until it
# counts as lost.
_SILENCE, _GONE = 10, 30

Encode = Callable[[Any], bytes]
Decode = Callable[[bytearray], Any]

dumps: Encode = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)


class LinkLost(ConnectionError):
    """The other end is lost."""


class Wire:
    """Whole messages over a connected socket."""

    def __init__(
        self, connected: socket.socket, encode: Encode = dumps, decode: Decode = pickle.loads
    ) -> None:
        self._socket, self._encode, self._decode = connected, encode, decode
        self._read = bytearray()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def fileno(self) -> int:
        """For `select`: readable when there is something to :meth:`receive`."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Raises :class:`LinkLost` where the other end is lost."""
        data = self._encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise LinkLost(str(error)) from error

    def receive(self, timeout: float | None = 0.0) -> list[Any]:
        """The messages that have arrived; waits up to `timeout` seconds (None: for ever) for the
        first. Raises :class:`LinkLost` when all have been received and the other end is lost."""
        if not (messages := self._arrived()) and timeout != 0:
            self._poll.poll(None if timeout is None else 1e3 * timeout)
            messages = self._arrived()
        return messages

    def close(self) -> None:
        self._socket.close()

    def _arrived(self) -> list[Any]:
        messages = []
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
        start, size = 0, len(self._read)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._read, start)
            end = start + _LENGTH.size + length
            if size < end:
                break
            messages.append(self._decode(self._read[start + _LENGTH.size : end]))
            start = end
        del self._read[:start]
        if gone and not messages:
            raise LinkLost("the other end has closed")
        return messages


class WireListener:
    """Accepts connections at `port` from processes that know the `key`. One that does not read for
    `patience` seconds is lost; None waits for ever."""

    def __init__(
        self,
        host: str = "",
        encode: Encode = dumps,
        decode: Decode = pickle.loads,
        patience: int | None = PATIENCE,
    ) -> None:
        self.key = secrets.token_bytes(32)
        self._encode, self._decode, self._patience = encode, decode, patience
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        self._coming = select.poll()
        self._coming.register(self._socket, select.POLLIN)

    def accept(self, timeout: float) -> Wire | None:
        """The next connection within `timeout` seconds; None where there is none, or it does not
        know the key."""
        if not self._coming.poll(1e3 * timeout):
            return None
        connected, _ = self._socket.accept()
        try:
            _authenticate(connected, self.key, self._patience, first=True)
        except (OSError, EOFError, AuthenticationError):
            connected.close()
            return None
        return Wire(connected, self._encode, self._decode)

    def close(self) -> None:
        self._socket.close()


def connect(
    host: str,
    port: int,
    key: bytes,
    encode: Encode = dumps,
    decode: Decode = pickle.loads,
    patience: int | None = PATIENCE,
) -> Wire:
    """A wire to a :class:`WireListener`. Raises :class:`LinkLost` where it cannot be reached or has
    another key."""
    try:
        connected = socket.create_connection((host, port), timeout=PATIENCE)
        _authenticate(connected, key, patience, first=False)
    except (OSError, EOFError, AuthenticationError) as error:
        raise LinkLost(f"nobody to talk to at {host}:{port}: {error}") from error
    return Wire(connected, encode, decode)


def _authenticate(connected: socket.socket, key: bytes, patience: int | None, first: bool) -> None:
    """Each end challenges the other, beginning with the listener (`first`). Raises where an answer
    is wrong."""
    connected.settimeout(None)  # the system's own limits, which leave a peek without waiting alone
    # A listener may be busy for long before it accepts; it never waits for long itself.
    for way in (socket.SO_SNDTIMEO, *([socket.SO_RCVTIMEO] if first else [])):
        connected.setsockopt(socket.SOL_SOCKET, way, _TIMEVAL.pack(PATIENCE, 0))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _SILENCE),
        (socket.TCP_KEEPINTVL, _SILENCE),
        (socket.TCP_USER_TIMEOUT, 1000 * _GONE),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, name, value)
    steps = (deliver_challenge, answer_challenge)
    with Connection(os.dup(connected.fileno())) as connection:
        for step in steps if first else reversed(steps):
            step(connection, key)
    limit = _TIMEVAL.pack(patience or 0, 0)  # 0: none
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
