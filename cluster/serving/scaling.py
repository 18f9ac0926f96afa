"""How many replicas there are."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from specdec_core.base.errors import UserError

UP, DOWN = 30.0, 600.0  # seconds


@dataclass(frozen=True)
class Replicas:
    """From `least` to `most`. Another one is started when it was needed for `up` seconds, and one
    is stopped when it was not needed for `down` seconds."""

    least: int = 1
    most: int = 1
    up: float = UP
    down: float = DOWN

    @classmethod
    def asked(
        cls, replicas: int, max_replicas: int | None, up: float = UP, down: float = DOWN
    ) -> Replicas:
        """As the options say. Raises :class:`UserError`."""
        if max_replicas is not None and max_replicas < replicas:
            raise UserError(
                f"--max-replicas {max_replicas}: fewer than the {replicas} of --replicas"
            )
        return cls(replicas, max_replicas or replicas, up, down)


ONE = Replicas()


class Scaling:
    """Decides when a replica is started or stopped."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._more = inf  # the time since which another one is needed
        self._fewer = inf  # the time since which one fewer is enough

    def change(self, count: int, running: int, slots: int, now: float) -> int:
        """1 to start a replica, -1 to stop one, else 0, where `count` replicas with `slots` slots
        each have `running` unfinished requests. `now` is in seconds."""
        wanted = self.replicas
        more = count < wanted.most and running > count * slots
        fewer = count > wanted.least and running <= (count - 1) * slots
        self._more = min(self._more, now) if more else inf
        self._fewer = min(self._fewer, now) if fewer else inf
        if now - self._more >= wanted.up:
            self._more = inf
            return 1
        if now - self._fewer >= wanted.down:
            self._fewer = inf
            return -1
        return 0
