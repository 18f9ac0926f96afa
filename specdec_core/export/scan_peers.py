"""Runs a scan: the program with each of the settings, interleaved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

from specdec_core.base.environment import environment
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, Sampling, distinct_labels
from specdec_core.cost import Profile
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.evidence.bench.race import PeerContestant, race
from specdec_core.evidence.peers.choose import plain_pair
from specdec_core.evidence.peers.peer import Peer
from specdec_core.evidence.peers.transformers import TransformersMode, TransformersPeer
from specdec_core.evidence.peers.vllm import (
    TOKENS,
    VllmMode,
    VllmPeer,
    by_load,
    environment_folder,
    suffix_modes,
)
from specdec_core.export.scan import Scanned, ScanResult, scanned_settings
from specdec_core.export.server import ExportTarget, Models
from specdec_core.models.pair import Pair
from specdec_core.prompts.chat import AUTO
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt_sets import PromptSet, load_prompts
from specdec_core.recordings.replay import Replay
from specdec_core.search.results import METRIC, Trial


@dataclass(frozen=True)
class ScanPlan:
    """Its name, the lengths of each way to draft, prompts at most, and repeats."""

    name: str
    lengths: tuple[int, ...]
    limit: int | None
    repeats: int


def run_scan(
    plan: ScanPlan,
    server: ExportTarget,
    models: Models,
    pair: Pair,
    replay: Replay,
    times: Profile,
    ranked: Sequence[Trial],
    observer: Observer,
) -> ScanResult:
    """Time the settings of a ranking in the program, greedily, on the prompts of its recording.

    Raises:
        UserError: the program does not run on this machine, or the prompts are missing.
    """
    header = replay.header
    count = min(plan.limit or header.prompts.count, header.prompts.count)
    source, template = header.prompts.source, header.prompts.chat_template or AUTO
    prompts = load_prompts(source, count, pair.tokenizer, template)
    texts = conversations(prompts, pair.tokenizer, header.max_new_tokens, pair.max_length)
    trials = scanned_settings(startable(server, ranked), plan.lengths)
    configurations = [trial.configuration for trial in trials]
    names = distinct_labels(configurations)
    labels = [names[configuration.id] for configuration in configurations]
    with open_settings(pair, server, models, configurations, labels, observer) as contestants:
        steps = len(contestants) * len(texts) * plan.repeats
        observer.stage(f"{len(contestants)} settings, interleaved", steps)
        rows = race(
            contestants, texts, header.max_new_tokens, Sampling(), plan.repeats, observer.step
        )
    return ScanResult(
        name=plan.name,
        started=datetime.now(UTC),
        server=server.title,
        pair=pair.spec,
        prompts=PromptSet.of(source, prompts, template),
        max_new_tokens=header.max_new_tokens,
        repeats=plan.repeats,
        times=times.device,
        recording=str(replay.recording.folder),
        scanned=[
            Scanned(
                configuration=trial.configuration,
                settings=contestant.peer.settings,
                expected=trial.metrics[METRIC],
                expected_tokens=trial.metrics["mat"],
                row=row,
            )
            for trial, contestant, row in zip(trials, contestants, rows, strict=True)
        ],
        environment=environment(),
    )


def startable(server: ExportTarget, ranked: Sequence[Trial]) -> list[Trial]:
    """What of a ranking the program can be started with here: vLLM lacks suffixes where the package
    for them is not installed, which a warning says."""
    if server.name != "vllm" or suffix_modes(environment_folder()):
        return list(ranked)
    drafters = [trial.configuration.drafter for trial in ranked]
    return [t for t, d in zip(ranked, drafters, strict=True) if not isinstance(d, SuffixSettings)]


@contextmanager
def open_settings(
    pair: Pair,
    server: ExportTarget,
    models: Models,
    configurations: Sequence[Configuration],
    labels: Sequence[str],
    observer: Observer,
) -> Iterator[list[PeerContestant]]:
    """vLLM or transformers with the settings of each configuration, ready to decode.
    Raises :class:`UserError` where vLLM is not installed."""
    settings = []
    for configuration in configurations:
        counterpart = server.counterpart(configuration.drafter, models)
        assert counterpart is not None  # the grid has nothing else
        settings.append(dict(counterpart.settings))
    with ExitStack() as opened:
        peers = (
            _vllm(pair, settings, labels, opened, observer)
            if server.name == "vllm"
            else _transformers(pair, configurations, settings, labels)
        )
        yield [
            PeerContestant(opened.enter_context(peer), server.name, not told)
            for peer, told in zip(peers, settings, strict=True)
        ]


def _vllm(
    pair: Pair,
    settings: Sequence[dict[str, Any]],
    labels: Sequence[str],
    opened: ExitStack,
    observer: Observer,
) -> list[Peer]:
    """One process for settings that differ in their length only. The length is set before each
    request; with suffixes vLLM takes it at its start only."""
    ways: dict[str, VllmMode] = {}
    keys = []
    for told in settings:
        fixed = told.get("method") == "suffix"
        key = repr({name: v for name, v in told.items() if fixed or name != TOKENS})
        keys.append(key)
        longest = ways.get(key)
        if longest is None or (longest.tokens or 0) < told.get(TOKENS, 0):
            ways[key] = VllmMode("vLLM " + told.get("method", ""), told or None)
    observer.stage("starting vLLM in its modes", len(ways))
    engines = {}
    for key, mode in ways.items():
        varies = mode.speculative is not None and mode.speculative["method"] != "suffix"
        engines[key] = opened.enter_context(VllmPeer(pair, by_load(mode) if varies else mode))
        observer.step()
    return [
        _LengthPeer(engines[key], told, label)
        for key, told, label in zip(keys, settings, labels, strict=True)
    ]


class _LengthPeer(Peer):
    """An open vLLM with a length that is set before each request."""

    def __init__(self, engine: VllmPeer, told: dict[str, Any], label: str) -> None:
        self.name, self.version = f"vLLM {label}", engine.version
        self.settings = {**engine.settings, "told": told}
        fixed = told.get("method") in (None, "suffix")
        self._engine, self._length = engine, None if fixed else told[TOKENS]

    def open(self) -> None:
        """The engine is open."""

    def forget(self) -> None:
        self._engine.forget()

    def decode(
        self,
        prompt_tokens: tuple[int, ...],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        self._engine.length = self._length
        tokens = self._engine.decode(prompt_tokens, max_new_tokens, temperature, seed)
        self.steps = self._engine.steps
        return tokens


def _transformers(
    pair: Pair,
    configurations: Sequence[Configuration],
    settings: Sequence[dict[str, Any]],
    labels: Sequence[str],
) -> list[Peer]:
    load = cache(lambda: plain_pair(pair.spec))
    peers: list[Peer] = []
    for configuration, told, label in zip(configurations, settings, labels, strict=True):
        mode = TransformersMode(f"transformers {label}")
        draft = configuration.draft_of(pair.drafts)
        if draft is not None:
            mode = replace(
                mode,
                assistant_tokens=told["num_assistant_tokens"],
                schedule=told["num_assistant_tokens_schedule"],
                confidence=told["assistant_confidence_threshold"],
            )
        elif told:
            mode = replace(
                mode,
                lookup_tokens=told["prompt_lookup_num_tokens"],
                lookup_size=told["max_matching_ngram_size"],
            )
        peer = TransformersPeer(load, mode, draft)
        peer.name = mode.label
        peers.append(peer)
    return peers
