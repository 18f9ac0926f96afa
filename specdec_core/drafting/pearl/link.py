"""The connection between the two sides of PEARL."""

from __future__ import annotations

from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost, Wire, WireListener
from specdec_core.drafting.pearl.messages import Message, decode, encode


def no_link() -> SocketLink:
    """The link of an engine in a single process. Always raises :class:`UserError`."""
    raise UserError(
        "drafter pearl drafts on a device of its own: say which, with --cluster and a placement"
    )


class SocketLink:
    """The target's end of the connection to its draft. Drafts that know the `key` connect to it at
    `port` of the address `host`. Messages arrive whole and in order until the draft is lost; then
    the next one that connects takes its place. `number` counts the drafts that have connected, and
    `configured` is the mark of the drafter that configured the current draft."""

    def __init__(self, host: str) -> None:
        self.number = 0
        self.configured: object = None
        self._listener = WireListener(host)
        self.port, self.key = self._listener.port, self._listener.key
        self._wire: Wire | None = None

    @property
    def connected(self) -> bool:
        """Whether a draft is connected, as far as is known."""
        return self._wire is not None

    def send(self, message: Message) -> None:
        """Send a message; it is dropped when no draft is connected."""
        if self._wire is not None:
            try:
                self._wire.send(encode(message))
            except LinkLost:
                self._lose()

    def receive(self, timeout: float = 0.0) -> list[Message]:
        """The draft's messages since the last call; waits up to `timeout` seconds for the first."""
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
