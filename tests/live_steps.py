"""What each step of a live engine did, to be compared with a simulation's."""

from collections.abc import Sequence
from typing import Any

from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import StepPlan
from specdec_core.search.load.live import run_clients
from specdec_core.search.load.records import records_frame
from specdec_core.tokens.statistics import Generation


class LiveSteps:
    """The requests of `clients` clients on an engine: its records, the plan of each step, the
    requests that decoded in it, and the generations by request."""

    def __init__(self, engine: Engine, requests: Sequence[Request], clients: int) -> None:
        self.plans: list[StepPlan] = []
        self.decoded: list[list[str]] = []
        self.generations: dict[str, Generation] = {}
        step = engine.step

        def logged(**options: Any) -> Any:
            chunks = step(**options)
            self.plans.append(engine.last)
            self.decoded.append([chunk.request_id for chunk in chunks])
            self.generations |= {c.request_id: c.finished for c in chunks if c.finished is not None}
            return chunks

        engine.step = logged
        self.records = records_frame(run_clients(engine, requests, clients))

    @property
    def steps(self) -> list[tuple[StepPlan, list[int]]]:
        """The plan of each step, and the number of candidates of each request in it."""
        rounds = {name: iter(each.rounds) for name, each in self.generations.items()}
        candidates = ([next(rounds[name]).drafted for name in step] for step in self.decoded)
        return list(zip(self.plans, candidates, strict=True))
