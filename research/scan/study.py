"""A ranking by replay compared with the program itself: its settings timed interleaved.

For each way in which a server drafts (a draft model, a lookup with some n-grams), its lengths are
timed beside autoregressive decoding, on the prompts that were recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import Field

from specdec_core.base.environment import environment
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.observer import Observer
from specdec_core.config import (
    Configuration,
    Document,
    DrafterSettings,
    PairSpec,
    Sampling,
    distinct_labels,
)
from specdec_core.cost import Profile
from specdec_core.evidence.bench.race import PeerContestant, race
from specdec_core.evidence.bench.result import BenchRow
from specdec_core.models.pair import Pair
from specdec_core.prompts.chat import AUTO
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt_sets import PromptSet, load_prompts
from specdec_core.recordings.replay import Replay
from specdec_core.search.results import METRIC, Trial
from specdec_core.servers.server import Models, Server
from specdec_core.tokens.statistics import Ratio, paired_ratio

log = logging.getLogger(__name__)


class Scanned(Document):
    """A setting of a server: its expected speedup by replay and a profile, the tokens of a step by
    replay, and its times in the program."""

    configuration: Configuration
    settings: dict[str, Any]
    expected: float
    expected_tokens: float | None = None
    row: BenchRow


class ScanResult(Document):
    """The settings of a server in the order of their expected speed, autoregressive decoding
    included, and how they were timed."""

    name: str
    started: datetime
    server: str
    pair: PairSpec
    prompts: PromptSet
    max_new_tokens: int
    repeats: int
    times: str  # the device of the forward times behind the expectation
    recording: str
    scanned: list[Scanned]
    environment: dict[str, str] = Field(default={})

    @property
    def labels(self) -> list[str]:
        names = distinct_labels(each.configuration for each in self.scanned)
        return [names[each.configuration.id] for each in self.scanned]

    @property
    def speeds(self) -> list[float]:
        """Tokens a second of each."""
        return [each.row.tokens_per_second for each in self.scanned]

    @property
    def first(self) -> Scanned:
        """The first of the ranking."""
        return self.scanned[0]

    @property
    def best(self) -> Scanned:
        """The fastest by measurement."""
        return self.scanned[int(np.argmax(self.speeds))]

    @property
    def spearman(self) -> float:
        """The rank correlation between expected and measured speed."""
        expected = pd.Series([each.expected for each in self.scanned])
        return float(expected.corr(pd.Series(self.speeds), method="spearman"))

    @property
    def regret(self) -> float:
        """The share of the best's speed that the ranking's first choice lacks."""
        return 1 - self.first.row.tokens_per_second / max(self.speeds)

    def over(self, each: Scanned, other: Scanned) -> Ratio:
        """How many times faster `each` is than `other`."""
        return paired_ratio(other.row.seconds_per_token, each.row.seconds_per_token)

    @property
    def plain(self) -> Scanned:
        """Autoregressive decoding."""
        return next(each for each in self.scanned if each.configuration.drafter is None)

    def save(self, folder: Path) -> Path:
        return write_atomically(folder / "scan.json", self.model_dump_json(indent=1))


def run_scan(
    name: str,
    server: Server,
    models: Models,
    pair: Pair,
    replay: Replay,
    times: Profile,
    ranked: Sequence[Trial],
    lengths: Sequence[int],
    limit: int | None,
    repeats: int,
    observer: Observer,
) -> ScanResult:
    """Time the settings of a ranking in the program, greedily, on the prompts of its recording, at
    most `limit`; see :func:`scanned_settings`.

    Raises:
        UserError: the program does not run on this machine, or the prompts are missing.
    """
    if (reason := server.missing({})) is not None:
        raise UserError(f"{server.title}: {reason}")
    header = replay.header
    count = min(limit or header.prompts.count, header.prompts.count)
    source, template = header.prompts.source, header.prompts.chat_template or AUTO
    prompts = load_prompts(source, count, pair.tokenizer, template)
    texts = conversations(prompts, pair.tokenizer, header.max_new_tokens, pair.max_length)
    trials = scanned_settings(startable(server, models, ranked), lengths, server.fixed_lengths)
    labels = distinct_labels(trial.configuration for trial in trials)
    drafters = {
        f"{server.title} {labels[trial.id]}": trial.configuration.drafter for trial in trials
    }
    peers = server.peers(pair, server.compared(drafters, models), shared=True)
    with ExitStack() as opened:
        observer.stage(f"starting {server.title} in its modes", len(peers))
        contestants = []
        for peer, trial in zip(peers, trials, strict=True):
            plain = trial.configuration.drafter is None
            contestants.append(PeerContestant(opened.enter_context(peer), server.name, plain))
            observer.step()
        new_tokens = header.max_new_tokens
        rows = race(contestants, texts, new_tokens, [Sampling()], repeats, observer)
    return ScanResult(
        name=name,
        started=datetime.now(UTC),
        server=server.title,
        pair=pair.spec,
        prompts=PromptSet.of(source, prompts, template),
        max_new_tokens=header.max_new_tokens,
        repeats=repeats,
        times=times.device,
        recording=str(replay.recording.folder),
        scanned=[
            Scanned(
                configuration=trial.configuration,
                settings=peer.settings,
                expected=trial.metrics[METRIC],
                expected_tokens=trial.metrics["mat"],
                row=row,
            )
            for trial, peer, row in zip(trials, peers, rows, strict=True)
        ],
        environment=environment(),
    )


def startable(server: Server, models: Models, ranked: Sequence[Trial]) -> list[Trial]:
    """The settings of a ranking that can start here; a warning names missing packages."""
    found = []
    missing: set[str] = set()
    for trial in ranked:
        counterpart = server.counterpart(trial.configuration.drafter, models)
        if counterpart is None:
            continue
        reason = server.missing(counterpart.settings)
        if reason is None:
            found.append(trial)
        else:
            missing.add(reason)
    for line in sorted(missing):
        log.warning("without some settings of %s: %s", server.title, line)
    return found


def scanned_settings(
    ranked: Sequence[Trial], lengths: Iterable[int], fixed: Sequence[str] = ()
) -> list[Trial]:
    """The settings of a ranking that are timed, in its order: autoregressive decoding and, for each
    kind of drafter with each draft and policy, the fastest setting, and its variant (n-grams,
    thresholds) at all `lengths`. Of the kinds `fixed` only the fastest setting is timed.

    Raises:
        UserError: the ranking has nothing that drafts at these lengths.
    """
    lengths, chosen = set(lengths), []
    ways: dict[tuple[str, ...], str] = {}
    for trial in ranked:
        drafter = trial.configuration.drafter
        if drafter is None:
            chosen.append(trial)
            continue
        policies = (policy.kind for _, policy in trial.configuration.policies)
        way = drafter.kind, trial.configuration.draft or "", *policies
        variant, length = _variant(drafter)
        seen = way in ways
        fastest = ways.setdefault(way, variant)
        if not seen or (variant == fastest and length in lengths and way[0] not in fixed):
            chosen.append(trial)
    if len(chosen) < 3:
        raise UserError(f"nothing to scan at lengths {', '.join(map(str, sorted(lengths)))}")
    return chosen


def _variant(drafter: DrafterSettings) -> tuple[str, int]:
    """The settings of a drafter without its length, and its length."""
    content = drafter.model_dump(mode="json")
    policy = content.get("policy")
    if isinstance(policy, dict):
        policy.pop("max_tokens", None)
    content.pop("max_tokens", None)
    return repr(content), drafter.depth
