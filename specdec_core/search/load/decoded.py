"""Rounds of configurations that no recording can tell: its prompts decoded live, once.

A configuration's rounds are kept in the recording's folder as `decoded/<id>-<digest>.parquet`,
written whole. The digest is of the trained heads, datastores and states that it reads, and of the
code of its drafters and policies.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd

from specdec_core.base.files import atomic_path
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.drafting.trained import trained_digests
from specdec_core.engine import Request
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.recordings.schema import Recording
from specdec_core.search.load.answers import configurations_by_load

# The rounds of a recording's prompts, decoded alone one after the other, as of `rounds_frame`.
Decode = Callable[[Configuration], pd.DataFrame]


@dataclass(frozen=True)
class KeptRounds:
    """The rounds that `decode` yields, kept with the recording: what was decoded before is read."""

    recording: Recording
    decode: Decode

    def __call__(self, configuration: Configuration) -> pd.DataFrame:
        read = json.dumps([trained_digests([configuration]), _code(configuration)], sort_keys=True)
        name = f"{configuration.id}-{hashlib.sha256(read.encode()).hexdigest()[:8]}.parquet"
        path = self.recording.folder / "decoded" / name
        if not path.exists():
            rounds = self.decode(configuration)
            with atomic_path(path) as temporary:
                rounds.to_parquet(temporary, index=False)
        return pd.read_parquet(path)


def _code(configuration: Configuration) -> list[str]:
    """The sources of its drafters and length policies."""
    parts = [*configuration.parts, *(policy for _, policy in configuration.policies)]
    modules = {type(part).__module__ for part in parts}
    return [inspect.getsource(sys.modules[module]) for module in sorted(modules)]


def recorded_requests(recording: Recording) -> list[Request]:
    """A request for each recorded prompt, as it was recorded."""
    prompts, most = recording.prompts, recording.header.max_new_tokens
    texts = zip(prompts.ids, prompts.tokens, prompts.numbers, strict=True)
    return [Request(name, tuple(tokens.tolist()), most, seed=n) for name, tokens, n in texts]


def with_decoded(
    replay: Replay,
    configurations: Iterable[Configuration],
    decode: Decode,
    observer: Observer | None = None,
) -> Replay:
    """`replay` with the rounds that simulating `configurations` takes and that it cannot tell, as
    `decode` yields them. Asynchronous drafting is left out, which only time tells, and so are
    policies that know the target's text, and other sampling than was recorded."""
    observer, header = observer or Observer(), replay.header
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
    """Whether the rounds of a configuration are known at every load."""
    return all(map(replay.can, configurations_by_load(configuration)))


def decoded_live(replay: Replay, configuration: Configuration) -> bool:
    """Whether some of a configuration's rounds were decoded rather than replayed."""
    return any(part.id in replay.decoded for part in configurations_by_load(configuration))
