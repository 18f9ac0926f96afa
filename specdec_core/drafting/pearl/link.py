"""How the two sides of PEARL reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specdec_core.base.errors import UserError


def no_link() -> Link:
    """The link of an engine that runs in one process only.

    Raises:
        UserError: always.
    """
    raise UserError(
        "drafter pearl drafts on a device of its own: say which, with --cluster and a placement"
    )


class Link(Protocol):
    """The target's end of the way to its draft. Messages arrive whole and in order, or the link
    is lost; then another draft may come, on the same link, under the next number. `configured` is
    the drafter by which the draft that is there now was told how to draft, `offset` the seconds
    that the draft's clock is behind."""

    configured: object
    offset: float

    @property
    def number(self) -> int:
        """How many drafts have come so far; 0 while none has."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the draft is there, as far as anybody knows."""
        ...

    def send(self, message: Any) -> None:
        """Say something. Nobody may be there to hear it."""
        ...

    def receive(self, timeout: float = 0.0) -> Sequence[Any]:
        """What the draft has said since the last call; waits up to so many seconds for the first
        of it."""
        ...
