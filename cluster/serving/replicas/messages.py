"""What an ingress and the replicas with the engines tell each other."""

from __future__ import annotations

from typing import Literal, NamedTuple

from cluster.serving.protocol.models import CanaryState
from cluster.serving.served import Deployment
from specdec_core.config import Configuration, PairSpec


class Facts(NamedTuple):
    """What a replica's engine can do. The pair's device and data types are resolved."""

    pair: PairSpec
    max_length: int
    vocab_size: int


class RequestsTaken(NamedTuple):
    """A replica decodes the requests, by this configuration until another one is said. Their chunks
    follow, each with its request's index."""

    replica: str
    configuration: Configuration


class Refused(NamedTuple):
    """A replica does not take the requests: one of them is bad, too many are waiting, or the engine
    does not work. In so many seconds there may be room."""

    replica: str
    because: Literal["bad", "full", "failed"]
    message: str
    waiting: int = 0
    seconds: int = 0


class Failed(NamedTuple):
    """A replica's engine has failed, and no other one could be started: the requests' last word."""

    message: str


class CommandDone(NamedTuple):
    """A replica has done what it was told, or an error says why not."""

    replica: str
    error: str | None = None


class Status(NamedTuple):
    """What a replica serves, and how its challenger stands, if it has or had one."""

    replica: str
    deployment: Deployment
    takes: bool  # requests that come now
    canary: CanaryState | None


class Gain(NamedTuple):
    """What a replica's bandit has learned by itself under a configuration since it said so last;
    None where nothing is learned."""

    replica: str
    configuration: Configuration
    sums: dict[str, list[float]] | None
