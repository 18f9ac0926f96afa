"""What replicas count, on one page for Prometheus.

Each series has a label `replica`, as Ray's own metrics have: sums over it are the server's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.serving.replicas.fleet import Fleet
from cluster.serving.replicas.prefixes import ROUTED

# Counted by the ingress for all replicas together: a switch is every replica's, and a submission
# may find the queues of two replicas full.
_SWITCHES, _REFUSED = "specdec:configuration_switches", "specdec:requests_refused"


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def metrics_page(
    model: str, found: Mapping[str, Sequence[Metric]], fleet: Fleet
) -> tuple[bytes, str]:
    """The replicas' metrics and the ingress' in Prometheus' text format, and its content type."""
    registry = CollectorRegistry()
    registry.register(_Families([*_labelled(found), *_own(model, len(found), fleet)]))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _labelled(found: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    families: dict[str, Metric] = {}
    for replica, metrics in sorted(found.items()):
        for metric in metrics:
            if metric.name in (_SWITCHES, _REFUSED):
                continue
            empty = Metric(metric.name, metric.documentation, metric.type)
            family = families.setdefault(metric.name, empty)
            for sample in metric.samples:
                family.samples.append(sample._replace(labels=sample.labels | {"replica": replica}))
    return [*families.values()]


def _own(model: str, replicas: int, fleet: Fleet) -> Iterator[Metric]:
    gauge = GaugeMetricFamily("specdec:replicas", "Those that answer.", labels=["model_name"])
    gauge.add_metric([model], replicas)
    yield gauge
    counts = (
        (_SWITCHES, "Times that it was replaced.", fleet.switches),
        (_REFUSED, "Submissions that found the queues full.", fleet.refused),
        (
            "specdec:requests_resumed",
            "Requests that another replica has gone on with.",
            fleet.resumed,
        ),
    )
    for name, text, value in counts:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter
    routed = CounterMetricFamily(
        "specdec:requests_routed",
        "Requests by why they went to their replica: it holds the beginning of their text (prefix),"
        " the one that does was too busy (busy), or none does (load).",
        labels=["model_name", "reason"],
    )
    for reason, count in ROUTED.items():
        routed.add_metric([model, reason], count)
    yield routed
