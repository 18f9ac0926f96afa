"""Rounds of configurations that a recording cannot replay: its prompts decoded live, once.

A configuration's rounds are kept in the recording's folder as `decoded/<id>-<digest>.parquet`,
written whole. The digest covers the trained heads and states that it loads, and the
code of its drafters and policies.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from functools import cache

import pandas as pd

from specdec_core.base.files import atomic_path
from specdec_core.base.names import digest_name
from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import Configuration
from specdec_core.config.kinds import run_time
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.drafting.trained import trained_digests
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.recordings.schema import Recording
from specdec_core.search.load.answers import configurations_by_load
from specdec_core.tokens.statistics import rounds_frame

# The rounds of a recording's prompts, decoded alone one after another, as of `rounds_frame`.
Decode = Callable[[Configuration], pd.DataFrame]


def kept_rounds(recording: Recording, decode: Decode) -> Decode:
    """The rounds that `decode` yields, kept with the recording: what was decoded before is read
    from its file."""

    def kept(configuration: Configuration) -> pd.DataFrame:
        used = json.dumps([trained_digests([configuration]), _code(configuration)], sort_keys=True)
        name = f"{configuration.id}-{digest_name(used)[:8]}.parquet"
        path = recording.folder / "decoded" / name
        if not path.exists():
            rounds = decode(configuration)
            with atomic_path(path) as temporary:
                rounds.to_parquet(temporary, index=False)
        return pd.read_parquet(path)

    return kept


def _code(configuration: Configuration) -> list[str]:
    """The sources of its drafters and length policies."""
    parts = [*configuration.parts, *(policy for _, policy in configuration.policies)]
    modules = {kind.__module__ for part in parts for kind in (type(part), run_time(part))}
    return [inspect.getsource(sys.modules[module]) for module in sorted(modules)]


def recorded_requests(recording: Recording) -> list[Request]:
    """A request for each recorded prompt, with its recorded seed."""
    prompts, most = recording.prompts, recording.header.max_new_tokens
    recorded = zip(prompts.ids, prompts.tokens, prompts.numbers, strict=True)
    return [Request(name, tuple(tokens.tolist()), most, seed=n) for name, tokens, n in recorded]


def with_live(
    replay: Replay, configurations: Iterable[Configuration], observer: Observer = SILENT
) -> Replay:
    """:func:`with_decoded` in this process. The pair is loaded when it is first needed; raises
    :class:`UserError` where it is missing, or has other weights than were recorded."""
    recording = replay.recording

    @cache
    def engine() -> Engine:
        pair = load_pair(recording.header.pair)
        recording.check(pair.fingerprints)
        return Engine(pair)

    def decode(configuration: Configuration) -> pd.DataFrame:
        engine().configure(configuration)
        return rounds_frame(engine().generate(recorded_requests(recording)))

    return with_decoded(replay, configurations, kept_rounds(recording, decode), observer)


def with_decoded(
    replay: Replay,
    configurations: Iterable[Configuration],
    decode: Decode,
    observer: Observer = SILENT,
) -> Replay:
    """`replay` with the rounds that simulating `configurations` needs and that it cannot replay, as
    `decode` yields them. Left out are asynchronous drafting, with rounds that depend on time,
    policies that know the target's output, and other sampling than was recorded."""
    header = replay.header
    parts = {part.id: part for each in configurations for part in configurations_by_load(each)}
    missing = [
        part
        for part in parts.values()
        if not replay.can(part)
        and part.sampling == header.sampling
        and not part.asynchronous
        and all(policy.decodes for _, policy in part.policies)
    ]
    if missing:
        observer.stage("decoding what cannot be replayed", len(missing))
    decoded = {}
    for part in missing:
        decoded[part.id] = ReplayedRounds.of_frame(decode(part), replay.recording.prompts.ids)
        observer.step()
    return replay.knowing(decoded)


def can_simulate(replay: Replay, configuration: Configuration) -> bool:
    """Whether the rounds of a configuration are known at every load, and it can be a part of a
    schedule."""
    parts = configurations_by_load(configuration)
    drafters = [each.drafter for each in parts if each.drafter is not None]
    # A schedule below another drafter goes by the load, too, which no replay has.
    inner = any(isinstance(part, ScheduleSettings) for each in drafters for part in each.walk())
    begun = any(each.target_started for each in drafters)
    return not (inner or begun) and all(map(replay.can, parts))


def decoded_live(replay: Replay, configuration: Configuration) -> bool:
    """Whether some of a configuration's rounds were decoded rather than replayed."""
    return any(part.id in replay.decoded for part in configurations_by_load(configuration))
