"""The service of an ingress: what replicas say, as one server's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.http.access import Access
from cluster.serving.http.service import Service
from cluster.serving.protocol.models import Arm, Health, ReplicaHealth
from cluster.serving.replicas.fleet import Fleet
from cluster.serving.replicas.messages import Facts
from cluster.serving.replicas.metrics import metrics_page
from cluster.serving.served import Deployment
from cluster.serving.stream import Stream
from specdec_core.config import Configuration
from specdec_core.engine import Request
from specdec_core.models.loading import load_skeleton, load_tokenizer
from specdec_core.models.pair import Pair

_SUMS = (
    *("slots", "queue", "running", "waiting", "cancelled", "restarts"),
    *("preemptions", "prefix_hits", "prefix_tokens"),
)


class ReplicaEngines(NamedTuple):
    """What is known of the replicas' engines without asking them."""

    configuration: Configuration
    pair: Pair
    max_length: int
    vocab_size: int


class ReplicatedService(Service):
    """Answers requests by the replicas of a fleet. What keys may use is counted here, once for all
    of them."""

    def __init__(self, fleet: Fleet, facts: Facts, model: str, access: Access) -> None:
        super().__init__(model, access, fleet.operation)
        self.fleet, self._facts = fleet, facts
        target = facts.pair.target
        self._last: Health | None = None
        self._pair = Pair(facts.pair, load_tokenizer(target), load_skeleton(target))

    @property
    def engine(self) -> ReplicaEngines:
        facts, configuration = self._facts, self.fleet.deployment.configuration
        return ReplicaEngines(configuration, self._pair, facts.max_length, facts.vocab_size)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.fleet.watched():
            yield

    async def begin(self, requests: Sequence[Request]) -> Stream[str]:
        return await self.fleet.submit(requests)

    async def health(self) -> Health:
        found: dict[str, Health] = dict(await self.fleet.ask("health"))
        if not found and self._last is None:
            raise EngineFailed("no replica answers")
        served = self.fleet.deployment
        last = self._last = _merged(found) if found else self._last
        assert last is not None
        merged = last.model_copy(
            update={
                "configuration": served.configuration.id,
                "label": served.configuration.label,
                "lossless": served.configuration.lossless,
                "source": served.told_source,
                "version": served.version,
                "certified": served.certificate is not None,
                "certificate": served.certificate,
                "switches": self.fleet.switches,
                "ready": last.ready and bool(found),
            }
        )
        if self.fleet.canary is not None:
            merged.canary = self.fleet.canary
        return merged

    async def ready(self) -> bool:
        return await self.fleet.takes()

    async def page(self) -> tuple[bytes, str]:
        found = dict(await self.fleet.ask("metrics"))
        return metrics_page(self.model, found, self.fleet)

    async def deploy(self, deployment: Deployment, canary: float | None = None) -> Deployment:
        if canary is not None:
            return await self.fleet.try_out(deployment, canary)
        return await self.fleet.deploy(deployment)

    async def roll_back(self) -> Deployment:
        return await self.fleet.roll_back()


def _merged(found: Mapping[str, Health]) -> Health:
    """The replicas' healths as one."""
    first, *_ = found.values()
    sums = {name: sum(getattr(health, name) for health in found.values()) for name in _SUMS}
    own = ReplicaHealth.model_fields.keys() - {"replica"}
    replicas = [
        ReplicaHealth(replica=name, **health.model_dump(include=set(own)))
        for name, health in sorted(found.items())
    ]
    changes = {
        "ready": any(health.ready for health in found.values()),
        "since": max(health.since for health in found.values()),
        "replicas": replicas,
        "drift": [alarm for health in found.values() for alarm in health.drift],
        **sums,
    }
    if first.arms:
        changes["arms"] = _arms([health.arms for health in found.values() if health.arms])
    return first.model_copy(update=changes)


def _arms(found: Sequence[Sequence[Arm]]) -> Sequence[Arm]:
    """What the replica knows that has learned most. They tell each other their rounds, and start
    from the same file, so a sum would count most of them several times."""
    return max(found, key=lambda arms: sum(arm.rounds for arm in arms))
