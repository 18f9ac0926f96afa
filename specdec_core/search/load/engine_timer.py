"""Timing configurations under a workload on the live engine."""

from __future__ import annotations

import gc

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.search.load.check import run_arrivals, run_clients
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load

_WARM_UP = 2  # requests that are answered untimed, at least


class EngineTimer:
    """Answers a workload's requests on an engine of this process, one configuration after the
    other."""

    def __init__(self, pair: Pair, traffic: Traffic) -> None:
        self.engine = Engine(pair, limits=traffic.limits)
        self.traffic = traffic
        self._requests: dict[Load, list[Request]] = {}

    def warm_up(self, configuration: Configuration, load: Load) -> None:
        """Answer the first requests, untimed, as many as the load may have at once."""
        self.engine.configure(configuration)
        together = load.clients or self.engine.slots
        run_clients(self.engine, self._of(load)[: max(together, _WARM_UP)], together)
        gc.collect()

    def answer(self, configuration: Configuration, load: Load) -> pd.DataFrame:
        """Records of the load's requests. An open loop's come on the wall clock."""
        self.engine.configure(configuration)
        requests = self._of(load)
        if load.clients is not None:
            return run_clients(self.engine, requests, load.clients).records
        return run_arrivals(self.engine, requests, self.traffic.arrivals(load)).records

    def _of(self, load: Load) -> list[Request]:
        """Raises :class:`UserError` for a request that the pair cannot take."""
        if load not in self._requests:
            requests = self.traffic.requests(load, self.engine.pair.tokenizer)
            for number, request in enumerate(requests):
                try:
                    request.check(
                        self.engine.max_length, self.engine.vocab_size, self.traffic.limits
                    )
                except UserError as error:
                    raise UserError(f"request {number} of the workload: {error}") from None
            self._requests[load] = requests
        return self._requests[load]
