"""Rounds of recorded prompts on the live engine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.engine import Engine
from specdec_core.models.pair import load_pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.load.decoded import KeptRounds, recorded_requests, with_decoded
from specdec_core.tokens.statistics import rounds_frame


class PromptDecoder:
    """Decodes a recording's prompts alone, one after the other, with its pair, which is loaded when
    it is first needed. Raises :class:`UserError` where the pair is not there, or has other weights
    than were recorded."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @cached_property
    def _engine(self) -> Engine:
        pair = load_pair(self.recording.header.pair)
        self.recording.check(pair.fingerprints)
        return Engine(pair)

    def __call__(self, configuration: Configuration) -> pd.DataFrame:
        self._engine.configure(configuration)
        return rounds_frame(self._engine.generate(recorded_requests(self.recording)))


def with_live(
    replay: Replay, configurations: Iterable[Configuration], observer: Observer | None = None
) -> Replay:
    """`replay` with the rounds of what it cannot replay, decoded here or kept from before (see
    :func:`with_decoded`)."""
    kept = KeptRounds(replay.recording, PromptDecoder(replay.recording))
    return with_decoded(replay, configurations, kept, observer)
