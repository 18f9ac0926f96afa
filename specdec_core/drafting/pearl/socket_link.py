"""A link over a socket, and the loop of the draft's process."""

from __future__ import annotations

import gc
import secrets
from contextlib import closing, suppress

from specdec_core.base.wire import LinkLost, Wire, WireListener, connect
from specdec_core.drafting.pearl.asynchronous_draft import AsynchronousDraft
from specdec_core.drafting.pearl.messages import Message, decode, encode
from specdec_core.models.pair import Pair

_COMPILING = 0.01  # seconds between two looks for a compiled grammar


class SocketLink:
    """A :class:`specdec_core.drafting.pearl.link.Link`. Drafts that know the `key` connect to it at
    `port` of the address `host`. When one is lost, the next one that connects takes its place."""

    def __init__(self, host: str) -> None:
        self.number = 0
        self.configured: object = None
        self._listener = WireListener(host)
        self.port, self.key = self._listener.port, self._listener.key
        self._wire: Wire | None = None

    @property
    def connected(self) -> bool:
        return self._wire is not None

    def send(self, message: Message) -> None:
        if self._wire is not None:
            try:
                self._wire.send(encode(message))
            except LinkLost:
                self._lose()

    def receive(self, timeout: float = 0.0) -> list[Message]:
        wire = self._wire or self._accept(timeout)
        if wire is None:
            return []
        try:
            return [decode(message) for message in wire.receive(timeout)]
        except LinkLost:
            self._lose()
            return []

    def wait(self, timeout: float) -> bool:
        """Whether a draft is connected, within `timeout` seconds."""
        return (self._wire or self._accept(timeout)) is not None

    def close(self) -> None:
        self._lose()
        self._listener.close()

    def _lose(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = self.configured = None

    def _accept(self, timeout: float) -> Wire | None:
        """Accept the next draft that connects within `timeout` seconds."""
        if (wire := self._listener.accept(timeout)) is None:
            return None
        self._wire, self.configured, self.number = wire, None, self.number + 1
        return wire


def serve(host: str, port: int, key: bytes, pair: Pair) -> None:
    """Draft for the engine at that address until it closes the connection. Raises
    :class:`LinkLost` where it cannot be reached."""
    with closing(connect(host, port, key)) as wire, suppress(LinkLost):
        draft = AsynchronousDraft(
            pair, lambda message: wire.send(encode(message)), salt=secrets.token_hex(8)
        )
        # What is loaded by now stays; collecting it again would keep the target waiting.
        gc.collect()
        gc.freeze()
        busy = False
        while True:
            idle = _COMPILING if draft.compiling else None
            for message in wire.receive(0.0 if busy else idle):
                draft.handle(decode(message))
            busy = draft.draft()
