"""A workload: the requests that are sent, and when.

```yaml
workload: {clients: [1, 4, 16]}                # closed loop: each client waits for its answer
workload: {rate: 6, arrivals: poisson, slo: {ttft: 0.5, tpot: 0.05}}     # open loop
workload: {trace: requests.jsonl}              # open loop, requests of a file
```
"""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from specdec_core.base.errors import UserError
from specdec_core.config import Value, parse

Arrivals = Literal["poisson", "constant"]
Objective = Literal["tokens_per_second", "goodput", "request_speed"]

CLIENTS = (1, 2, 4, 8, 16)
OPEN_SLOTS = max(CLIENTS)  # of an engine that an open loop is sent to
REQUESTS = 256  # of an open loop, unless a workload says how many
_FOR_EACH_CLIENT = 8  # requests of a closed loop for each of its clients, …
_LEAST = 64  # … and at least
_LIVE_EACH, _LIVE_LEAST, _LIVE_OPEN = 4, 20, 128  # of a live run, likewise; of an open loop


class Slo(Value):
    """A service-level objective: what a request must keep to count for goodput. Seconds."""

    ttft: float | None = Field(default=None, gt=0, description="to the first token")
    tpot: float | None = Field(default=None, gt=0, description="for each token after the first")
    latency: float | None = Field(default=None, gt=0, description="to the last token")

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if not self.limits:
            raise ValueError("an objective without a limit: give ttft, tpot or latency")
        return self

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given, by measure."""
        return self.model_dump(exclude_none=True)

    @classmethod
    def read(cls, text: str, source: str) -> Slo:
        """An objective as `ttft=0.3,tpot=0.02`. Raises :class:`UserError` that names `source`."""
        parts = [part.partition("=") for part in text.split(",")]
        if not all(separator for _, separator, _ in parts):
            raise UserError(f"{source} {text}: expected limits in seconds, as ttft=0.3,tpot=0.02")
        return parse(cls, {name.strip(): limit for name, _, limit in parts}, f"{source} {text}")

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} s" for name, limit in self.limits.items())


class Load(Value):
    """One load of a workload: `requests` requests of clients that wait for their answers, at a
    rate, or of a trace."""

    clients: PositiveInt | None = None
    rate: float | None = None
    requests: PositiveInt

    @property
    def closed(self) -> bool:
        """Whether clients wait for their answers."""
        return self.clients is not None

    @property
    def key(self) -> str:
        """Its name among several: `4` for clients, `2.5/s` for a rate."""
        return f"{self.rate:g}/s" if self.rate is not None else str(self.clients or "trace")

    @property
    def label(self) -> str:
        if self.clients is not None:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return "trace" if self.rate is None else f"{self.rate:g} requests/s"

    def __str__(self) -> str:
        return self.label


class Workload(Value):
    """Requests of clients that each wait for their answers, requests that arrive at a rate whether
    or not earlier ones are answered, or a trace."""

    clients: tuple[PositiveInt, ...] | None = Field(
        default=None, description="closed loop: clients that each send a request after the other"
    )
    rate: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="open loop: requests a second"
    )
    arrivals: Arrivals | None = Field(
        default=None, description="gaps between the requests of an open loop; unset, poisson"
    )
    trace: str | None = Field(
        default=None, description="JSONL file of requests with their arrival times"
    )
    requests: PositiveInt | None = Field(default=None, description="how many are sent")
    seed: NonNegativeInt = Field(default=0, description="of random arrivals")
    slo: Slo | None = Field(default=None, description="limits in seconds that goodput counts by")

    @field_validator("clients", mode="before")
    @classmethod
    def _one_number_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @field_validator("clients")
    @classmethod
    def _some_client(cls, clients: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if clients == ():
            raise ValueError("a workload without requests: no clients")
        return clients

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = {"clients": self.clients, "rate": self.rate, "trace": self.trace}
        given = [name for name, value in sources.items() if value is not None]
        if not given:
            raise ValueError("a workload without requests: give clients, a rate or a trace")
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say when requests come: give one")
        if self.arrivals is not None and self.rate is None:
            raise ValueError(f"arrivals belong to a rate, not to {given[0]}")
        if self.requests is not None and self.trace is not None:
            raise ValueError("a trace says itself how many requests there are")
        if self.requests is not None and self.requests < (most := max(self.clients or (0,))):
            raise ValueError(f"requests {self.requests}: fewer than the {most} clients")
        return self

    @property
    def closed(self) -> bool:
        """Whether clients wait for their answers."""
        return self.clients is not None

    @property
    def slots(self) -> int:
        """Of the engine that it is sent to: one for every client."""
        return max(self.clients or (OPEN_SLOTS,))

    def size(self, clients: int = 0) -> int:
        """Requests sent: by `clients` clients of a closed loop together, or by an open one."""
        if self.requests is not None:
            return self.requests
        return max(_FOR_EACH_CLIENT * clients, _LEAST) if clients else REQUESTS

    @property
    def objective(self) -> Objective:
        """What is compared: goodput where there are limits, tokens a second of a closed loop, and
        of an open one, which sets the pace itself, the speed that a request sees."""
        if self.slo is not None:
            return "goodput"
        return "tokens_per_second" if self.closed else "request_speed"


class LiveSettings(Value):
    """How finalists are timed at each load of a workload, on the live engine."""

    finalists: NonNegativeInt = Field(
        default=3, description="configurations timed at a load; 0, the simulation decides"
    )
    within: float = Field(
        default=0.1, gt=0, lt=1, description="share of the best simulated that they fall behind"
    )
    repeats: PositiveInt = Field(
        default=3,
        description="runs of each at most, interleaved; beyond two, of those still in question",
    )
    cost: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="share of the best that a choice may cost at most (95 %): shown, a race ends",
    )
    requests: PositiveInt | None = Field(
        default=None,
        description="requests of a run, at least one a client; unset, the workload's, or 4 a client"
        " and at least 20, of an open loop the first 128",
    )

    def size(self, load: Load, given: int | None) -> int:
        """Requests of a live run of `load`, of a workload that sends `given` where it says so."""
        if load.clients is None:
            return min(self.requests or _LIVE_OPEN, load.requests)
        wanted = self.requests or given or max(_LIVE_EACH * load.clients, _LIVE_LEAST)
        return max(wanted, load.clients)


def arrival_times(
    rate: float, count: int, arrivals: Arrivals = "poisson", seed: int = 0
) -> np.ndarray:
    """Seconds (count,) at which requests come, `rate` a second on average: at random and
    independently of each other (poisson), or evenly."""
    if arrivals == "constant":
        return np.arange(count) / rate
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
