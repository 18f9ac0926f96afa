"""Recordings that are made in the tests' own process."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from specdec_core.config import Configuration, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.recordings.record import record_requests
from specdec_core.recordings.replay import Replay
from specdec_core.tokens.statistics import Counts, Generation, Round, rounds_frame

TOKENS = 32
SAMPLINGS = {"greedy": Sampling(), "coupled": Sampling(temperature=1.0, coupling="gumbel")}
COLUMNS = ["request_id", "round"]
COLUMNS += [name for name in Round.__dataclass_fields__ if not name.endswith("_seconds")]


def replay_of(pair: Pair, texts: Sequence[str], folder: Path, new_tokens: int = 24) -> Replay:
    """The replay of a recording of `texts`."""
    asked = [
        Request(str(n), tuple(pair.tokenizer(text)["input_ids"]), new_tokens, seed=n)
        for n, text in enumerate(texts)
    ]
    return Replay(record_requests(pair, asked, folder, mixing=0), hidden=False)


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
