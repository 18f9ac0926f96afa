"""The connection between the two sides of PEARL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specdec_core.base.errors import UserError


def no_link() -> Link:
    """The link of an engine in a single process. Always raises :class:`UserError`."""
    raise UserError(
        "drafter pearl drafts on a device of its own: say which, with --cluster and a placement"
    )


class Link(Protocol):
    """The target's end of the connection to its draft. Messages arrive whole and in order until
    the draft is lost; then another draft may connect under the next number. `configured` is the
    mark of the drafter that configured the current draft."""

    configured: object

    @property
    def number(self) -> int:
        """How many drafts have connected so far."""
        ...

    @property
    def connected(self) -> bool:
        """Whether a draft is connected, as far as is known."""
        ...

    def send(self, message: Any) -> None:
        """Send a message; it is dropped when no draft is connected."""
        ...

    def receive(self, timeout: float = 0.0) -> Sequence[Any]:
        """The draft's messages since the last call; waits up to `timeout` seconds for the first."""
        ...
