"""How many replicas there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec_core.base.errors import UserError

UP, DOWN = 30.0, 600.0  # seconds; Ray Serve's own


@dataclass(frozen=True)
class Replicas:
    """From `least` to `most`. Another one is started when it was needed for `up` seconds, and one
    is stopped when it was not for `down` seconds."""

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

    def options(self, slots: int) -> dict[str, Any]:
        """Ray Serve's options of the deployment. Another replica is started when each one has more
        unfinished requests than it decodes together."""
        if self.least == self.most:
            return {"num_replicas": self.least}
        scaling = {
            "min_replicas": self.least,
            "max_replicas": self.most,
            "target_ongoing_requests": slots,
            "upscale_delay_s": self.up,
            "downscale_delay_s": self.down,
        }
        return {"autoscaling_config": scaling}


ONE = Replicas()
