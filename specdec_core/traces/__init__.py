"""Recordings of real prompts, and the exact replay of any configuration from them."""

from specdec_core.traces.record import Recorder
from specdec_core.traces.replay import Replay
from specdec_core.traces.rounds import ReplayedRounds
from specdec_core.traces.schema import Header, Recording, Trace, save_header, write_shard
from specdec_core.traces.thresholds import (
    BestThreshold,
    best_threshold,
    decision_cost,
)

__all__ = [
    "BestThreshold",
    "Header",
    "Recorder",
    "Recording",
    "Replay",
    "ReplayedRounds",
    "Trace",
    "best_threshold",
    "decision_cost",
    "save_header",
    "write_shard",
]
