"""How counting configurations scales over nodes, and its bottleneck."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from research.scale.memory import MemoryWatch

ENOUGH = 0.9  # a part at this share of its capacity is the bottleneck


@dataclass(frozen=True)
class Scaled:
    """The cost of counting `trials` configurations on some nodes; times in seconds."""

    nodes: int
    slots: int  # trials that a node runs at a time
    trials: int
    idle: float | None  # sleep of a trial; None where it decodes
    starting: float  # start-up of the nodes
    counting: float
    finished: list[float]  # when each trial finished
    driver: float  # CPU time of this process while counting
    main_thread: float  # the part of it in Tune and the folder
    logging: float  # time to write all trials to MLflow
    free: float  # memory before, MiB
    memory: MemoryWatch

    @cached_property
    def rate(self) -> float:
        """Trials a second, without the first of each slot, which load the models."""
        steady = sorted(self.finished)[min(self.nodes * self.slots, self.trials // 2) :]
        return (len(steady) - 1) / max(steady[-1] - steady[0], 1e-9) if len(steady) > 1 else 0.0

    @property
    def share(self) -> float | None:
        """The rate's share of what the workers allow; None where they decode."""
        return self.rate * self.idle / (self.nodes * self.slots) if self.idle else None

    @property
    def busy(self) -> float:
        """The share of a core that this process took."""
        return self.driver / self.counting

    @property
    def busy_counting(self) -> float:
        """The share of a core that Tune and the folder took."""
        return self.main_thread / self.counting

    @property
    def bottleneck(self) -> str:
        """The part that limits the rate."""
        if self.share is None or self.share > ENOUGH:
            return "workers"
        return "driver: Tune and the folder" if self.busy > ENOUGH else "starting trials"
