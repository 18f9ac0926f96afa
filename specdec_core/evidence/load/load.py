"""A load: clients that wait for their answers, or requests that come at a rate."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from specdec_core.config import Value


class BenchLoad(Value):
    """What a server is put under, one of two. In a closed loop each of `clients` clients sends its
    next request when its last is answered; in an open loop `rate` requests a second come at random,
    whether or not others are answered."""

    clients: PositiveInt | None = None
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.clients is None) == (self.rate is None):
            raise ValueError("give clients or a rate")
        return self

    @property
    def closed(self) -> bool:
        """Whether clients wait for their answers."""
        return self.clients is not None

    @property
    def key(self) -> str:
        """Its name among others: `4` for clients, `2.5/s` for a rate."""
        return f"{self.rate:g}/s" if self.rate is not None else str(self.clients)

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests a second"
        return f"{self.clients} client{'s' if self.clients != 1 else ''}"
