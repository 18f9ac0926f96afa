"""Whole messages over a socket, between processes that share a key.

Both ends prove that they know the key before a message is read, and every message carries a code by
which the other end knows that it is unchanged, and the next one. Messages are not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import select
import socket
import threading
import time
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from struct import Struct
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview

LIMIT = 64 << 20  # bytes of a message, unless more are expected
PATIENCE = 5  # seconds after which an end that does not read counts as lost
GREETING = 10.0  # seconds in which a connection must prove that it knows the key
# A machine that is lost closes nothing, so TCP probes it: seconds between probes, and until it
# counts as lost.
_SILENCE, _GONE = 10, 30
_CROWD = 64  # connections that may prove themselves at a time; a new one then ends the oldest
_CHUNK = 1 << 20
_TIMEVAL = Struct("@ll")
_NONCE = 32  # bytes
_PROOF = 32
_CODE = 16
_HEAD = Struct(f"!Q{_CODE}s")  # a message's length and its code
_NUMBER = Struct("!Q")


class LinkLost(ConnectionError):
    """The other end is lost."""


class Wire:
    """Whole messages over a connected socket, of at most `limit` bytes each.

    The codes of messages sent are made with the first of `keys`, of messages received with the
    second.
    """

    def __init__(
        self,
        connected: socket.socket,
        keys: tuple[bytes, bytes],
        limit: int,
        patience: int | None,
    ) -> None:
        _set_limits(connected, patience)
        self._socket, self._limit = connected, limit
        self._sending, self._receiving = (hmac.new(key, digestmod="sha256") for key in keys)
        self._sent = self._received = 0
        self._read = bytearray()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def fileno(self) -> int:
        """For `select`: readable when there is something to :meth:`receive`."""
        return self._socket.fileno()

    def send(self, message: Buffer) -> None:
        """Raises :class:`LinkLost` where the other end is lost."""
        data = memoryview(message).cast("B")
        if len(data) > self._limit:
            raise ValueError(f"a message of {len(data)} bytes; at most {self._limit} are sent")
        head = _HEAD.pack(len(data), _code(self._sending, self._sent, data))
        self._sent += 1
        try:
            self._socket.sendall(b"".join((head, data)))
        except OSError as error:
            raise LinkLost(str(error)) from error

    def receive(self, timeout: float | None = 0.0) -> list[bytearray]:
        """The messages that have arrived; waits up to `timeout` seconds (None: for ever) for the
        first. Raises :class:`LinkLost` when all have been received and the other end is lost, and
        for a message that is too long or was changed on its way."""
        if not (messages := self._arrived()) and timeout != 0:
            self._poll.poll(None if timeout is None else 1e3 * timeout)
            messages = self._arrived()
        return messages

    def close(self) -> None:
        self._socket.close()

    def _arrived(self) -> list[bytearray]:
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
        while size - start >= _HEAD.size:
            length, code = _HEAD.unpack_from(self._read, start)
            if length > self._limit:
                raise LinkLost(f"a message of {length} bytes; at most {self._limit} are read")
            end = start + _HEAD.size + length
            if size < end:
                break
            message = self._read[start + _HEAD.size : end]
            if not hmac.compare_digest(code, _code(self._receiving, self._received, message)):
                raise LinkLost("a message was changed on its way")
            self._received += 1
            messages.append(message)
            start = end
        del self._read[:start]
        if gone and not messages:
            raise LinkLost("the other end has closed")
        return messages


def _code(keyed: hmac.HMAC, number: int, message: Buffer) -> bytes:
    """The code of a connection's message `number`, which so cannot be sent twice or left out."""
    code = keyed.copy()
    code.update(_NUMBER.pack(number))
    code.update(message)
    return code.digest()[:_CODE]


class WireListener:
    """Accepts connections at `port` of the address `host` from processes that know the `key`.

    They are greeted in a thread. A connection that proves nothing within :data:`GREETING` seconds
    is dropped and keeps no other waiting. For `limit` see :class:`Wire`; an end that does not read
    for `patience` seconds is lost, None waits for ever.
    """

    def __init__(self, host: str, limit: int = LIMIT, patience: int | None = PATIENCE) -> None:
        self.host, self.key = host, secrets.token_bytes(32)
        self._limit, self._patience = limit, patience
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._wires: SimpleQueue[Wire] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._greeted: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._thread = threading.Thread(target=self._run, name="greeting", daemon=True)
        self._thread.start()

    def accept(self, timeout: float) -> Wire | None:
        """The next connection within `timeout` seconds, or None."""
        with suppress(Empty):
            return self._wires.get(timeout=timeout)
        return None

    def close(self) -> None:
        """Stop listening. Connections that were accepted stay."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        while (wire := self.accept(0)) is not None:
            wire.close()

    def _run(self) -> None:
        with self._socket:
            self._loop.add_reader(self._socket, self._take)
            self._loop.run_forever()
            self._loop.remove_reader(self._socket)
        self._loop.run_until_complete(self._drop_all())
        self._loop.close()

    async def _drop_all(self) -> None:
        for greeting in self._greeted:
            greeting.cancel()
        await asyncio.gather(*self._greeted, return_exceptions=True)

    def _take(self) -> None:
        """Begin to greet the next connection."""
        try:
            connected, _ = self._socket.accept()
        except BlockingIOError:  # it is gone again
            return
        except OSError:  # too many files are open
            self._loop.remove_reader(self._socket)
            self._loop.call_later(0.1, self._loop.add_reader, self._socket, self._take)
            return
        connected.setblocking(False)
        greeting = self._loop.create_task(self._greet(connected))
        greeting.add_done_callback(lambda done: self._greeted.pop(done, None))
        self._greeted[greeting] = None
        if len(self._greeted) > _CROWD:
            next(iter(self._greeted)).cancel()

    async def _greet(self, connected: socket.socket) -> None:
        with suppress(OSError), ExitStack() as dropped:
            dropped.enter_context(connected)
            async with asyncio.timeout(GREETING):
                challenge = secrets.token_bytes(_NONCE)
                await self._loop.sock_sendall(connected, challenge)
                sent = b""
                while missing := _NONCE + _PROOF - len(sent):
                    if not (data := await self._loop.sock_recv(connected, missing)):
                        return
                    sent += data
                reply, proof = sent[:_NONCE], sent[_NONCE:]
                derived = _derive(self.key, challenge + reply)
                if not hmac.compare_digest(proof, derived.proof):
                    return
                await self._loop.sock_sendall(connected, derived.answer)
            keys = derived.to_connecting, derived.to_listening
            wire = Wire(connected, keys, self._limit, self._patience)
            dropped.pop_all()
            self._wires.put(wire)


def connect(
    host: str, port: int, key: bytes, limit: int = LIMIT, patience: int | None = PATIENCE
) -> Wire:
    """A wire to a :class:`WireListener`. Raises :class:`LinkLost` where it cannot be reached or has
    another key."""
    try:
        with ExitStack() as dropped:
            connected = dropped.enter_context(socket.create_connection((host, port), _GONE))
            deadline = time.monotonic() + _GONE
            challenge = _exactly(_NONCE, connected, deadline)
            reply = secrets.token_bytes(_NONCE)
            derived = _derive(key, challenge + reply)
            connected.sendall(reply + derived.proof)
            if not hmac.compare_digest(_exactly(_PROOF, connected, deadline), derived.answer):
                raise LinkLost("what listens there does not know the key")
            keys = derived.to_listening, derived.to_connecting
            wire = Wire(connected, keys, limit, patience)
            dropped.pop_all()
            return wire
    except OSError as error:
        raise LinkLost(f"no process answers at {host}:{port}: {error}") from error


class _Derived(NamedTuple):
    """What both ends derive from the key and the messages of the greeting: the proof of the end
    that connects, the listener's answer, and the keys of the messages to each end."""

    proof: bytes
    answer: bytes
    to_listening: bytes
    to_connecting: bytes


def _derive(key: bytes, said: bytes) -> _Derived:
    return _Derived(*(hmac.digest(key, use + said, "sha256") for use in (b"0", b"1", b"2", b"3")))


def _exactly(size: int, connected: socket.socket, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connected.settimeout(max(deadline - time.monotonic(), 1e-3))
        if not (more := connected.recv(size - len(data))):
            raise LinkLost("it closed the connection")
        data += more
    return data


def _set_limits(connected: socket.socket, patience: int | None) -> None:
    connected.settimeout(None)  # the system's own limits, which leave a peek without waiting alone
    for level, name, value in (
        (socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(patience or 0, 0)),  # 0: none
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE),
    ):
        connected.setsockopt(level, name, value)
