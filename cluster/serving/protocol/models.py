"""Answers about models, as OpenAI's, and about the server's health."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelPermission(BaseModel):
    """What clients of vLLM's may ask for; of everybody the same."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: Literal[False] = False
    allow_sampling: Literal[True] = True
    allow_logprobs: Literal[True] = True
    allow_search_indices: Literal[False] = False
    allow_view: Literal[True] = True
    allow_fine_tuning: Literal[False] = False
    organization: Literal["*"] = "*"
    group: None = None
    is_blocking: Literal[False] = False


class ModelCard(BaseModel):
    """OpenAI's card, and what vLLM's has more. `root` is the hub id that the target came from; for
    any other, the name that it is served under."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specdec"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[ModelPermission]

    @classmethod
    def of(cls, name: str, root: str, created: int, max_length: int) -> ModelCard:
        permission = ModelPermission(id=f"modelperm-{name}", created=created)
        return cls(
            id=name,
            created=created,
            root=root,
            max_model_len=max_length,
            permission=[permission],
        )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Arm(BaseModel):
    """A bandit's statistics of one of its arms; null where it has none."""

    arm: str
    rounds: int
    share: float
    tokens: float | None  # of a round, on average
    per_millisecond: float | None  # tokens


class CanaryState(BaseModel):
    """How a challenger that gets a share of the traffic stands: over so many pairs of turns, how
    many times faster than the champion it is, with an interval that holds at all times."""

    configuration: str  # its id
    label: str
    share: float
    state: Literal["running", "promoted", "dropped"]
    reason: str  # why, where it is over
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
    """The traffic has changed: the mean of a signal before, and of the latest requests."""

    signal: str  # acceptance, prompt_tokens
    time: int
    requests: int  # that it looked at
    before: float
    after: float


class Health(BaseModel):
    """Whether requests are answered, and by what."""

    ready: bool
    model: str
    configuration: str  # its id
    label: str
    lossless: bool
    slots: int
    queue: int  # choices that may wait; more requests are refused
    max_length: int
    running: int  # choices that are waiting or being decoded
    waiting: int  # of these, those without a slot
    preemptions: int  # times a choice has made room for an older one in the cache
    prefix_hits: int  # prompts that began like a text in the cache
    prefix_tokens: int  # tokens of them that were not read again
    cancelled: int  # HTTP requests given up by their clients
    chat: bool  # whether the tokenizer has a chat template
    since: int  # when it began to decode by this configuration
    source: str  # where that comes from
    version: int | None  # of the registered model
    certified: bool
    certificate: str | None  # what it says
    switches: int  # times that the configuration was replaced
    restarts: int  # of an engine that had failed
    canary: CanaryState | None = None  # the last one
    replicas: list[ReplicaHealth] = []  # where there are several; the counts are sums of theirs
    drift: list[DriftAlarm] = []  # the latest
    arms: list[Arm] = []  # where a bandit with memory of all requests chooses who drafts


class Ready(BaseModel):
    """Whether a request that comes now is answered."""

    ready: bool


class Version(BaseModel):
    version: str
