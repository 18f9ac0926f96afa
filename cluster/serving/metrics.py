"""The counters of a server, for Prometheus.

Names are vLLM's where it counts the same, so that dashboards made for vLLM work; the others begin
with `specdec:`. A round adds one to a table of (arm, drafted, accepted), from which the counts of
rounds are made for each page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.serving.drift import Drift
from cluster.serving.engine_loop import LoopObserver
from cluster.serving.engine_process import EngineProcess
from cluster.serving.fleet import Fleet
from cluster.serving.protocol.counts import drafted_by
from cluster.serving.replica import Replica
from specdec_core.base.memory import resident
from specdec_core.config import Configuration
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Round
from specdec_core.tokens.token_tree import TokenOrigin

# Upper ends of the histograms' buckets, vLLM's: seconds to the first token, between rounds and of a
# token, and of a whole request.
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_CANDIDATES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)

# (arm, candidates drafted, candidates accepted) of rounds, and how many were so.
Rounds = Counter[tuple[int | None, int, int]]


@dataclass(slots=True)
class _CountedAnswer:
    """An unfinished request: when it began, and its prompt's tokens; when its first tokens and its
    latest ones came, and how many there are."""

    began: float
    prompt: int
    first: float | None = None
    latest: float = 0.0
    tokens: int = 0

    @property
    def each(self) -> float:
        """Seconds of a token after the first; 0 where there is none, as vLLM has it."""
        if self.first is None or self.tokens < 2:
            return 0.0
        return (self.latest - self.first) / (self.tokens - 1)


class Metrics(Collector, LoopObserver):
    """Follows the requests of a fleet, and counts in a registry of its own.

    Times are seconds since the request was handed to an engine.
    """

    def __init__(self, model: str, fleet: Fleet) -> None:
        self._model, self._fleet = model, fleet
        self._unfinished: dict[str, _CountedAnswer] = {}
        self._rounds: dict[Configuration, Rounds] = {}
        # Zero from the beginning: of a counter that appears late, Prometheus misses the first rise.
        self._origins: Counter[TokenOrigin] = Counter(dict.fromkeys(TokenOrigin, 0))
        self._seconds = dict.fromkeys(("draft", "target", "other", "read"), 0.0)
        self._oracle = 0.0
        self._ended: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self._refused = self._prompt = self._generated = self._asked = self._cached = 0
        self.drift = Drift()
        self.registry = CollectorRegistry()
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token.", _FIRST
        )
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between rounds with tokens.", _BETWEEN
        )
        self._each = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time of a token after the first, of each request.",
            _BETWEEN,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time of a whole request.", _WHOLE
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds", "Time of a request until it had a slot.", _WHOLE
        )
        self.registry.register(self)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            name, text, ["model_name"], registry=self.registry, buckets=list(buckets)
        )
        return histogram.labels(self._model)

    def page(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its content type. (In OpenMetrics' the client
        library writes `_` for the colon of names.)"""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    # What happens.

    def submitted(self, request: Request) -> None:
        self._unfinished[request.id] = _CountedAnswer(perf_counter(), len(request.tokens))

    def refused(self) -> None:
        self._refused += 1

    def rejected(self, request_ids: Iterable[str]) -> None:
        # As with vLLM, which checks a request before it takes it, they have not begun.
        for request_id in request_ids:
            self._unfinished.pop(request_id, None)

    def prefilled(self, seconds: float) -> None:
        self._seconds["read"] += seconds

    def stepped(self, configuration: Configuration, chunks: Sequence[Chunk]) -> None:
        now = perf_counter()
        rounds = self._rounds.setdefault(configuration, Counter())
        for chunk in chunks:
            answer = self._unfinished[chunk.request_id]
            if chunk.adds:
                if answer.first is None:
                    answer.first = now
                    self._first.observe(now - answer.began)
                    self._prompt += answer.prompt
                elif chunk.tokens:
                    self._between.observe(now - answer.latest)
                answer.latest = now
                answer.tokens += len(chunk.tokens)
            self._generated += len(chunk.tokens)
            self._origins.update(chunk.origins)
            rounds[chunk.round.arm, chunk.round.drafted, chunk.round.accepted] += 1
            if chunk.finished:
                whole = now - answer.began
                self._whole.observe(whole)
                self._queued.observe(max(whole - chunk.finished.seconds, 0.0))
                self._each.observe(answer.each)
                self._asked += answer.prompt
                self._cached += chunk.finished.cached_tokens
                if chunk.finished.failure is None:
                    self.drift.finished(configuration, chunk.finished, answer.prompt)
                self._end(chunk.request_id, chunk.finished.finish_reason)
        if chunks:
            self._spend([chunk.round for chunk in chunks])

    def dropped(self, request_id: str) -> None:
        self._end(request_id, "abort")

    def failed(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._end(request_id, "error")

    def _end(self, request_id: str, reason: str) -> None:
        if self._unfinished.pop(request_id, None) is not None:
            self._ended[reason] += 1

    def _spend(self, rounds: Sequence[Round]) -> None:
        """The requests of a step share its times. An oracle would have drafted up to the deepest
        candidate that was accepted."""
        step = rounds[0]
        self._seconds["draft"] += step.draft_seconds
        self._seconds["target"] += step.target_seconds
        self._seconds["other"] += step.other_seconds
        deepest = max(each.depth for each in rounds)
        wanted = max(min(each.accepted, each.depth) for each in rounds)
        drafting = step.draft_seconds * wanted / deepest if deepest else 0.0
        self._oracle += drafting + step.target_seconds + step.other_seconds

    # What is asked for.

    def collect(self) -> Iterator[Metric]:
        """All but the histograms."""
        yield from self._gauges()
        yield from self._requests()
        yield from self._speculation()
        yield from self._events()
        evidence = GaugeMetricFamily(
            "specdec:drift_evidence",
            "For a change of the traffic; from 1 on it may raise the alarm.",
            labels=["model_name", "signal"],
        )
        for name, signal in self.drift.signals.items():
            evidence.add_metric([self._model, name], signal.detector.evidence)
        yield evidence

    def _gauges(self) -> Iterator[Metric]:
        fleet, configuration = self._fleet, self._fleet.deployment.configuration
        yield self._by_replica(
            "vllm:num_requests_running", "Decoded now.", lambda each: each.running - each.waiting
        )
        yield self._by_replica(
            "vllm:num_requests_waiting", "Without a slot.", lambda each: each.waiting
        )
        yield self._by_replica(
            "vllm:kv_cache_usage_perc",
            "Share of the cache that running requests take, 1 is all.",
            lambda each: each.served.loop.engine.status().cache_usage,
        )
        preemptions = [each.served.loop.engine.status().preemptions for each in fleet.replicas]
        yield self._counter(
            "vllm:num_preemptions", "Times a request made room for another.", sum(preemptions)
        )
        memory = {"server": resident()}
        engines = [each.served.loop.engine for each in fleet.replicas]
        if held := sum(each.memory for each in engines if isinstance(each, EngineProcess)):
            memory["engine"] = held
        family = GaugeMetricFamily(
            "specdec:resident_memory_bytes", "Memory held.", labels=["model_name", "process"]
        )
        for process, held in memory.items():
            family.add_metric([self._model, process], held * 2**20)
        yield family
        yield self._gauge("specdec:replicas", "Engines that answer.", len(fleet.replicas))
        labels = ["model_name", "configuration", "label", "lossless", "certified"]
        info = GaugeMetricFamily("specdec:configuration_info", "What is served.", labels=labels)
        certified = fleet.deployment.certificate is not None
        flags = [str(value).lower() for value in (configuration.lossless, certified)]
        info.add_metric([self._model, configuration.id, configuration.label, *flags], 1)
        yield info

    def _events(self) -> Iterator[Metric]:
        fleet = self._fleet
        yield self._counter(
            "specdec:configuration_switches", "Times that it was replaced.", fleet.switches
        )
        yield self._counter(
            "specdec:engine_restarts", "Engines that failed and were started again.", fleet.restarts
        )
        yield self._counter(
            "specdec:requests_resumed", "Requests continued by another engine.", fleet.resumed
        )
        yield self._counters(
            "specdec:requests_routed",
            "Requests by the reason for their replica: it holds the beginning of their sequence"
            " (prefix), the one that does was too busy (busy), or none does (load).",
            "reason",
            fleet.routed,
        )
        yield self._counters(
            "specdec:drift_alarms", "Changes of the traffic.", "signal", self.drift.counts
        )

    def _requests(self) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", self._prompt)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", self._generated)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens of finished requests' prompts.", self._asked
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Of these, tokens that the cache held.", self._cached
        )
        yield self._counters(
            "vllm:request_success", "Requests that ended.", "finished_reason", self._ended
        )
        yield self._counter(
            "specdec:requests_refused", "Submissions that found the queue full.", self._refused
        )

    def _speculation(self) -> Iterator[Metric]:
        rounds = sum(self._rounds.values(), Rounds())
        drafted, accepted = _sums(rounds, 1), _sums(rounds, 2)
        yield self._counter(
            "vllm:spec_decode_num_drafts", "Rounds that had candidates.", _above(drafted, 0)
        )
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Candidates.", _total(drafted.items())
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Candidates accepted.", _total(accepted.items())
        )
        places = {place: _above(accepted, place) for place in range(max([*drafted, 1]))}
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Candidates accepted at each position of a draft.",
            "position",
            places,
        )
        arms = Counter({drafted_by(self._fleet.deployment.configuration, None): 0})
        for configuration, table in self._rounds.items():
            for arm, count in _sums(table, 0).items():
                arms[drafted_by(configuration, arm)] += count
        yield self._counters("specdec:rounds", "Rounds by who drafted.", "arm", arms)
        yield self._counters("specdec:tokens", "Tokens by origin.", "origin", self._origins)
        yield self._counters(
            "specdec:step_seconds", "Time of the engine's steps by part.", "part", self._seconds
        )
        yield self._counter(
            "specdec:oracle_seconds",
            "Estimated time of the same steps without reading, had every draft ended with its last"
            " accepted token.",
            self._oracle,
        )
        yield self._candidates(drafted)

    def _candidates(self, drafted: Mapping[int, int]) -> Metric:
        name, text = "specdec:round_candidates", "Candidates of a round."
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        rounds = sum(drafted.values())
        ends = [(str(float(k)), float(rounds - _above(drafted, k))) for k in _CANDIDATES]
        buckets = [*ends, ("+Inf", float(rounds))]
        family.add_metric([self._model], buckets, _total(drafted.items()))
        return family

    def _by_replica(self, name: str, text: str, value: Callable[[Replica], float]) -> Metric:
        """A gauge; of several replicas with their names."""
        replicas = self._fleet.replicas
        several = ["replica"] if len(replicas) > 1 else []
        family = GaugeMetricFamily(name, text, labels=["model_name", *several])
        for replica in replicas:
            family.add_metric([self._model, replica.name][: 1 + len(several)], value(replica))
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, str(key)], value)
        return family


def _sums(rounds: Rounds, column: int) -> Counter:
    """Rounds by one column of the table."""
    sums: Counter = Counter()
    for key, count in rounds.items():
        sums[key[column]] += count
    return sums


def _above(lengths: Mapping[int, int], place: int) -> int:
    """Rounds whose length is greater than `place`."""
    return sum(count for length, count in lengths.items() if length > place)


def _total(lengths: Iterable[tuple[int, int]]) -> int:
    return sum(length * count for length, count in lengths)
