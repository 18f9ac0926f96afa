"""Recordings of real prompts, and the exact replay of any configuration from them."""

from specdec_core.traces.record import Recorder
from specdec_core.traces.replay import Replay, ReplayedRounds
from specdec_core.traces.schema import Header, Recording, Trace, save_header, write_shard

__all__ = [
    "Header",
    "Recorder",
    "Recording",
    "Replay",
    "ReplayedRounds",
    "Trace",
    "save_header",
    "write_shard",
]
