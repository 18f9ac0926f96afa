"""Recordings that are made in the tests' own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Header, Recording, save_header, write_shard
from specdec_core.tokens.statistics import Counts, Generation, Round, rounds_frame

COLUMNS = ["request_id", "round"]
COLUMNS += [name for name in Round.__dataclass_fields__ if not name.endswith("_seconds")]


def recorded(
    pair: Pair, requests: Sequence[Request], folder: Path, /, **changes: object
) -> Recording:
    """A recording of `requests`; `header` replaces facts of its header."""
    facts = {
        "pair": pair.spec,
        "fingerprints": pair.fingerprints,
        "eos_token_ids": tuple(pair.eos_token_ids),
        "prompts": PromptSet(source="test", count=len(requests), digest="0"),
        "max_new_tokens": requests[0].max_new_tokens,
        **changes,
    }
    header = Header(**facts)
    save_header(header, folder)
    write_shard(Recorder(pair, header).record(list(enumerate(requests))), folder, 0)
    return Recording.open(folder)


def assert_replayed(
    replay: Replay, pair: Pair, configuration: Configuration, requests: Sequence[Request]
) -> None:
    """The replay has the very rounds that decoding takes."""
    assert_same(replay, configuration, Engine(pair, configuration).generate(requests))


def assert_same(replay: Replay, configuration: Configuration, live: list[Generation]) -> None:
    """Round by round the same, and so the same counts."""
    replayed = replay.run(configuration)
    pd.testing.assert_frame_equal(
        replayed.frame()[COLUMNS], rounds_frame(live)[COLUMNS], check_dtype=False
    )
    assert replayed.counts == Counts.of(live)
