"""The counters of a server, for Prometheus.

Metrics that vLLM has, too, have vLLM's names, so that dashboards made for vLLM work. The names of
all other metrics begin with `specdec:`. A round adds one to a table of (arm, drafted, accepted),
from which the counts of rounds are made for each page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.serving.drift import Drift
from cluster.serving.engine_fleet import EngineFleet
from cluster.serving.engine_loop import LoopObserver
from cluster.serving.protocol.counts import drafted_by
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
    """Follows the requests of a fleet. `registry` has the metrics.

    Times are seconds since the request was handed to an engine.
    """

    def __init__(self, model: str, fleet: EngineFleet) -> None:
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

    def page(self) -> bytes:
        """All metrics in Prometheus' text format. (In OpenMetrics' the client library writes `_`
        for the colon of names.)"""
        return generate_latest(self.registry)

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
                assert answer.first is not None  # also an end adds
                # Of a request that another engine resumed, `seconds` are that engine's alone.
                queued = min(whole - chunk.finished.seconds, answer.first - answer.began)
                self._queued.observe(max(queued, 0.0))
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

    # The page.

    def collect(self) -> Iterator[Metric]:
        """All but the histograms."""
        yield from self._gauges()
        fleet, configuration = self._fleet, self._fleet.deployment.configuration
        rounds = sum(self._rounds.values(), Rounds())
        drafted, accepted = _sums(rounds, 1), _sums(rounds, 2)
        places = {str(n): _above(accepted, n) for n in range(max([*drafted, 1]))}
        arms = Counter({drafted_by(configuration, None): 0})
        for decoded_by, table in self._rounds.items():
            for arm, count in _sums(table, 0).items():
                arms[drafted_by(decoded_by, arm)] += count
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", self._prompt),
            ("vllm:generation_tokens", "Generated tokens.", self._generated),
            ("vllm:prefix_cache_queries", "Tokens of finished requests' prompts.", self._asked),
            ("vllm:prefix_cache_hits", "Of these, tokens that the cache held.", self._cached),
            ("vllm:spec_decode_num_drafts", "Rounds with candidates.", _above(drafted, 0)),
            ("vllm:spec_decode_num_draft_tokens", "Candidates.", _total(drafted)),
            ("vllm:spec_decode_num_accepted_tokens", "Candidates accepted.", _total(accepted)),
            (
                "specdec:oracle_seconds",
                "Estimated time of the same steps without prefills, had every draft ended with its"
                " last accepted token.",
                self._oracle,
            ),
            ("specdec:requests_refused", "Submissions that found the queues full.", self._refused),
            ("specdec:requests_resumed", "Requests continued by another engine.", fleet.resumed),
            ("specdec:configuration_switches", "Times that it was replaced.", fleet.switches),
            ("specdec:engine_restarts", "Engines started again after a failure.", fleet.restarts),
        ):
            yield self._family(CounterMetricFamily, name, text, {"": value})
        engines = {each.name: each.served.loop.engine for each in fleet.replicas}
        preempted = {name: engine.status().preemptions for name, engine in engines.items()}
        for name, text, label, values in (
            ("vllm:request_success", "Requests that ended.", "finished_reason", self._ended),
            (
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Candidates accepted at each position of a draft.",
                "position",
                places,
            ),
            ("specdec:rounds", "Rounds by the drafter's arm.", "arm", arms),
            ("specdec:tokens", "Tokens by origin.", "origin", self._origins),
            ("specdec:step_seconds", "Time of the engine's steps.", "part", self._seconds),
            (
                "specdec:requests_routed",
                "Requests by the reason for their replica: it holds the beginning of their sequence"
                " (prefix), the one that does was too busy (busy), or none does (load).",
                "reason",
                fleet.routed,
            ),
            ("specdec:drift_alarms", "Changes of the traffic.", "signal", self.drift.counts),
            (
                "vllm:num_preemptions",
                "Times a request made room for another.",
                self._replica,
                preempted,
            ),
        ):
            yield self._family(CounterMetricFamily, name, text, values, label)
        yield self._candidates(drafted)

    def _gauges(self) -> Iterator[Metric]:
        fleet, configuration = self._fleet, self._fleet.deployment.configuration
        for name, text, value in (
            ("vllm:num_requests_running", "Decoded now.", lambda each: each.running - each.waiting),
            ("vllm:num_requests_waiting", "Without a slot.", lambda each: each.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the cache that running requests take, 1 is all.",
                lambda each: each.served.loop.engine.status().cache_usage,
            ),
        ):
            values = {each.name: value(each) for each in fleet.replicas}
            yield self._family(GaugeMetricFamily, name, text, values, self._replica)
        memory = {"server": float(psutil.Process().memory_info().rss)}
        if held := sum(each.served.loop.engine.memory for each in fleet.replicas):
            memory["engine"] = held * 2**20
        gauge = partial(self._family, GaugeMetricFamily)
        yield gauge("specdec:resident_memory_bytes", "Memory held.", memory, "process")
        yield gauge("specdec:replicas", "Engines that answer.", {"": len(fleet.working)})
        text = "For a change of the traffic; from 1 on it may raise the alarm."
        evidence = {name: each.detector.evidence for name, each in self.drift.signals.items()}
        yield gauge("specdec:drift_evidence", text, evidence, "signal")
        labels = ["model_name", "configuration", "label", "lossless", "certified"]
        info = GaugeMetricFamily("specdec:configuration_info", "What is served.", labels=labels)
        certified = fleet.deployment.certificate is not None
        flags = [str(flag).lower() for flag in (configuration.lossless, certified)]
        info.add_metric([self._model, configuration.id, configuration.label, *flags], 1)
        yield info

    def _candidates(self, drafted: Mapping[int, int]) -> Metric:
        name, text = "specdec:round_candidates", "Candidates of a round."
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        rounds = sum(drafted.values())
        ends = [(str(float(k)), float(rounds - _above(drafted, k))) for k in _CANDIDATES]
        family.add_metric([self._model], [*ends, ("+Inf", float(rounds))], _total(drafted))
        return family

    @property
    def _replica(self) -> str:
        """The label of values of each replica; none for a single one."""
        return "replica" if len(self._fleet.replicas) > 1 else ""

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[Any, float],
        label: str = "",
    ) -> Metric:
        """A metric with a value for each of a label's, or, without a label, with the only one."""
        family = kind(name, text, labels=["model_name", label] if label else ["model_name"])
        for key, value in values.items():
            family.add_metric([self._model, str(key)] if label else [self._model], value)
        return family


def _sums(rounds: Rounds, column: int) -> Counter:
    """Rounds by one column of the table."""
    sums: Counter = Counter()
    for key, count in rounds.items():
        sums[key[column]] += count
    return sums


def _above(lengths: Mapping[int, int], least: int) -> int:
    """The number of rounds with a length greater than `least`."""
    return sum(count for length, count in lengths.items() if length > least)


def _total(lengths: Mapping[int, int]) -> int:
    return sum(length * count for length, count in lengths.items())
