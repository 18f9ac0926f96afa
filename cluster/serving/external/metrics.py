"""The metrics of other programs' servers, and what is counted of the requests that pass through."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster.serving.drift import Drift
from cluster.serving.external.process import ExternalServer
from cluster.serving.fleet import Fleet
from specdec_core.servers.completions import ACCEPTED, CANDIDATES

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 160.0)
# What grows while vLLM or llama.cpp works on requests, without the prefix.
_TOKENS = ("prompt_tokens_total", "generation_tokens_total", "n_decode_total")


class ExternalMetrics(Collector):
    """The metrics of the servers, as they give them, and of the requests that pass through."""

    def __init__(self, fleet: Fleet[ExternalServer]) -> None:
        self._fleet, self.drift = fleet, Drift()
        self._pages: dict[str, str] = {}  # by the name of the replica
        self._counted = (0.0, 0.0)  # candidates, and those accepted
        self.registry = CollectorRegistry()
        self.ended = Counter(
            "specdec:requests", "Requests that ended.", ["reason"], registry=self.registry
        )
        self.first = Histogram(
            "specdec:time_to_first_byte_seconds",
            "Time to the first byte of an answer.",
            buckets=_FIRST,
            registry=self.registry,
        )
        self.registry.register(self)

    async def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self._pages = await self._read()
        return generate_latest(self.registry)

    async def _read(self) -> dict[str, str]:
        """The page of each server that answers, by its name."""
        servers = self._fleet.working
        pages = await asyncio.gather(*(server.metrics() for server in servers))
        named = zip(servers, pages, strict=True)
        return {server.name: page for server, page in named if page is not None}

    async def look(self) -> None:
        """Follow the tokens that each server counts, and the share of candidates that was accepted
        since the last look."""
        drafted = accepted = 0.0
        servers = [replica.served for replica in self._fleet.replicas]
        pages = await self._read()
        for server in servers:
            if (page := pages.get(server.name)) is None:
                continue  # it may hang, and has counted nothing
            sums = _sums(page)
            drafted += sums.get(CANDIDATES, 0.0)
            accepted += sums.get(ACCEPTED, 0.0)
            server.has_counted(tuple(sums[name] for name in _TOKENS if name in sums))
        before, self._counted = self._counted, (drafted, accepted)
        if drafted > before[0] and accepted >= before[1]:  # else a server has begun anew
            share = (accepted - before[1]) / (drafted - before[0])
            self.drift.accepted(self._fleet.deployment.configuration, min(share, 1.0))

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        yield GaugeMetricFamily("specdec:replicas", "Servers that answer.", len(fleet.working))
        yield GaugeMetricFamily("specdec:requests_running", "Passing through.", fleet.running)
        yield CounterMetricFamily(
            "specdec:configuration_switches", "Times that it was replaced.", fleet.switches
        )
        yield CounterMetricFamily(
            "specdec:engine_restarts", "Servers started again.", fleet.restarts
        )
        alarms = CounterMetricFamily(
            "specdec:drift_alarms", "Changes of the traffic.", labels=["signal"]
        )
        for signal, count in self.drift.counts.items():
            alarms.add_metric([signal], count)
        yield alarms
        yield from self._given()

    def _given(self) -> Iterator[Metric]:
        """The families of all pages. With several replicas, samples have the replica's name."""
        families: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                if family.name.startswith("specdec:"):
                    continue
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    more = {"replica": replica} if len(self._pages) > 1 else {}
                    known.samples.append(sample._replace(labels={**sample.labels, **more}))
        yield from families.values()


def _sums(page: str) -> dict[str, float]:
    """The sum of the samples of each name, without its prefix, in a page of metrics."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums
