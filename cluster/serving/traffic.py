"""What a running server has done between two readings of its `/metrics` and `/health`.

The server is read over HTTP, so no request waits for this. Sums are over all labels that are not
named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from time import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.serving.control import RunningServer

Labels = frozenset[tuple[str, str]]
Samples = Mapping[tuple[str, Labels], float]

# Histograms by the name that their quantiles get; in milliseconds.
_TIMES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "inter_token": "vllm:inter_token_latency_seconds",
    "per_token": "vllm:request_time_per_output_token_seconds",
    "request": "vllm:e2e_request_latency_seconds",
}
_QUANTILES = {"median": 0.5, "p95": 0.95}


@dataclass(frozen=True)
class Reading:
    """`/metrics` and `/health` at a time in seconds."""

    time: float
    samples: Samples
    health: Mapping[str, Any]


def read(server: RunningServer) -> Reading:
    """Read a server. Raises :class:`UserError` where it does not answer."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(server.metrics())
        for sample in family.samples
    }
    return Reading(time(), samples, server.health())


def between(before: Reading, after: Reading) -> dict[str, float]:
    """Load, speed and acceptance from one reading to the other. Values without data are left out:
    there is no acceptance without candidates, and no latency without requests.

    Quantiles are read from the histograms' buckets, linearly within one, as Prometheus does.
    """
    seconds = max(after.time - before.time, 1e-9)
    grown = _Grown(before.samples, after.samples)
    requests = grown.sum("vllm:request_success_total")
    tokens = grown.sum("vllm:generation_tokens_total")
    rounds = grown.sum("specdec:rounds_total")
    drafts = grown.sum("vllm:spec_decode_num_drafts_total")
    candidates = grown.sum("vllm:spec_decode_num_draft_tokens_total")
    accepted = grown.sum("vllm:spec_decode_num_accepted_tokens_total")
    ended = grown.by("vllm:request_success_total", "finished_reason")
    values = {
        "tokens_per_second": tokens / seconds,
        "prompt_tokens_per_second": grown.sum("vllm:prompt_tokens_total") / seconds,
        "requests": requests,
        "requests_per_second": requests / seconds,
        "requests_abandoned": ended.get("abort", 0.0),
        "requests_failed": ended.get("error", 0.0),
        "requests_refused": grown.sum("specdec:requests_refused_total"),
        "running": total(after.samples, "vllm:num_requests_running"),
        "waiting": total(after.samples, "vllm:num_requests_waiting"),
        "switches": total(after.samples, "specdec:configuration_switches_total"),
    }
    if rounds:
        values["mat"] = tokens / rounds
    if candidates:
        values["acceptance"] = accepted / candidates
        values["discarded_per_token"] = (candidates - accepted) / max(tokens, 1.0)
    if drafts:
        places = grown.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
        for place in sorted(places, key=int):
            values[f"acceptance_at.{int(place) + 1}"] = places[place] / drafts
    for (name, labels), value in after.samples.items():
        if name == "specdec:drift_evidence":
            key = f"drift_evidence.{dict(labels)['signal']}"
            values[key] = max(value, values.get(key, 0.0))
    for key, name in _TIMES.items():
        buckets = grown.by(f"{name}_bucket", "le")
        for word, share in _QUANTILES.items():
            if (found := quantile(buckets, share)) is not None:
                values[f"{key}_ms.{word}"] = 1000 * found
    return values


class _Grown:
    """The growth of counters. A counter that has shrunk was reset."""

    def __init__(self, before: Samples, after: Samples) -> None:
        self._before, self._after = before, after

    def by(self, name: str, label: str) -> dict[str, float]:
        """For each value of a label."""
        sums: dict[str, float] = {}
        for (known, labels), now in self._after.items():
            if known == name:
                then = self._before.get((known, labels), 0.0)
                value = dict(labels).get(label, "")
                sums[value] = sums.get(value, 0.0) + (now - then if now >= then else now)
        return sums

    def sum(self, name: str) -> float:
        return sum(self.by(name, "").values())


def total(samples: Samples, name: str) -> float:
    """The sum of a metric's samples."""
    return sum(value for (known, _), value in samples.items() if known == name)


def quantile(buckets: Mapping[str, float], share: float) -> float | None:
    """The `share`-quantile of a histogram, given as cumulative counts by upper end; None where it
    is empty. A quantile beyond the last finite end is that end."""
    ends = sorted((float(end), count) for end, count in buckets.items())
    if not ends or not ends[-1][1]:
        return None
    wanted, low, below = share * ends[-1][1], 0.0, 0.0
    for end, count in ends:
        if count >= wanted and count > below:
            return low if end == inf else low + (end - low) * (wanted - below) / (count - below)
        low, below = end, count
    return low


class Events:
    """Changes of what is served, as sentences, from one reading of `/health` to the next."""

    def __init__(self, health: Mapping[str, Any]) -> None:
        self._health = health
        self._before: str | None = None  # the configuration to which a rollback returns
        self.drifted: str | None = None  # the signal that has changed last

    def since(self, health: Mapping[str, Any]) -> Iterator[str]:
        """The events since the last reading."""
        before, self._health = self._health, health
        yield from _canary(before.get("canary"), health.get("canary"))
        if health["switches"] != before["switches"]:
            back = health["configuration"] == self._before
            self._before = before["configuration"]
            yield f"{'rolled back to' if back else 'deployed'} {_said(health)}"
        if health["restarts"] > before["restarts"]:
            yield "the engine had failed and was started again"
        known = before.get("drift", [])
        for alarm in health.get("drift", []):
            if alarm not in known:
                self.drifted = alarm["signal"]
                yield (
                    f"the traffic has changed: {alarm['signal']} {alarm['before']:.3g} before,"
                    f" {alarm['after']:.3g} now"
                )


def _canary(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[str]:
    if now is None or now == before:
        return
    anew = before is None or before["configuration"] != now["configuration"]
    if anew or (before is not None and before["state"] != "running" and now["state"] == "running"):
        yield f"canary {now['configuration']} ({now['label']}) gets {now['share']:.0%} of requests"
    if now["state"] != "running" and (anew or before is None or before["state"] == "running"):
        yield f"canary {now['configuration']} {now['state']}: {now['reason']}"


def _said(health: Mapping[str, Any]) -> str:
    certified = "" if health["certified"] else ", not certified"
    return f"{health['configuration']} ({health['label']}; {health['source']}{certified})"
