"""How many replicas there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec_core.base.errors import UserError


@dataclass(frozen=True)
class Replicas:
    """From `least` to `most`, as Ray Serve finds to be needed. Raises :class:`UserError`."""

    least: int = 1
    most: int = 1

    @classmethod
    def asked(cls, replicas: int, max_replicas: int | None) -> Replicas:
        """As the options say. Raises :class:`UserError`."""
        if max_replicas is not None and max_replicas < replicas:
            raise UserError(
                f"--max-replicas {max_replicas}: fewer than the {replicas} of --replicas"
            )
        return cls(replicas, max_replicas or replicas)

    def options(self, slots: int) -> dict[str, Any]:
        """Ray Serve's options of the deployment. Another replica is started when each one has more
        unfinished requests than it decodes together."""
        if self.least == self.most:
            return {"num_replicas": self.least}
        scaling = {"min_replicas": self.least, "max_replicas": self.most}
        return {"autoscaling_config": scaling | {"target_ongoing_requests": slots}}


ONE = Replicas()
