"""Answers about models, as OpenAI's, and about the server's health."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """OpenAI's card, with two fields of vLLM's. `root` is the hub id of the target model; for a
    model from elsewhere, the name that it is served under."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specdec"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Arm(BaseModel):
    """A bandit's statistics of one of its arms; null where it has none."""

    arm: str
    rounds: int
    share: float
    tokens: float | None  # in a round, on average
    per_millisecond: float | None  # tokens


class CanaryState(BaseModel):
    """How a challenger with a share of the traffic compares with the champion: over n pairs of
    interleaved turns, its speedup and the speedup's anytime-valid interval."""

    configuration: str  # its id
    label: str
    share: float
    state: Literal["running", "promoted", "dropped"]
    reason: str  # why it has ended
    pairs: int
    ratio: float | None
    low: float | None
    high: float | None


class ReplicaHealth(BaseModel):
    """One of several replicas."""

    replica: str  # its name in metrics
    ready: bool
    configuration: str  # its id
    running: int
    waiting: int
    restarts: int
    prefix_hits: int


class DriftAlarm(BaseModel):
    """The traffic has changed: the mean of a signal before, and over the latest requests."""

    signal: str  # acceptance, prompt_tokens
    time: int
    requests: int  # that were looked at
    before: float
    after: float


class Health(BaseModel):
    """Whether requests are answered, and how."""

    ready: bool
    model: str
    configuration: str  # its id
    label: str
    lossless: bool
    slots: int
    queue: int  # choices that may wait; further requests are refused
    max_length: int
    running: int  # choices that wait or are being decoded
    waiting: int  # the part of `running` without a slot
    preemptions: int  # choices that were preempted, for room in the KV cache
    prefix_hits: int
    prefix_tokens: int  # prompt tokens that were not prefilled again
    cancelled: int  # HTTP requests with a client that disconnected
    chat: bool  # whether the tokenizer has a chat template
    since: int  # when this configuration began to be served
    source: str  # of the configuration
    version: int | None  # of the registered model
    certified: bool
    certificate: str | None  # its sentence
    switches: int  # times that the configuration was replaced
    restarts: int  # of an engine that had failed
    canary: CanaryState | None = None  # the last one
    replicas: list[ReplicaHealth] = []  # where there are several; the counts above are sums
    drift: list[DriftAlarm] = []  # the latest
    arms: list[Arm] = []  # of a bandit that learns over all requests
    engine: str | None = None  # the other program that answers, if one does


class Ready(BaseModel):
    """Whether a request that comes now is answered."""

    ready: bool


class Version(BaseModel):
    version: str
