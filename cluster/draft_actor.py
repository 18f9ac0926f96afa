"""PEARL on a cluster: the draft is an actor on a separate device."""

from __future__ import annotations

import logging
import time
from functools import cached_property
from typing import Any

import ray

from cluster.placement import Placed
from cluster.session import get, listening_address, start_actor
from cluster.sharded_target.shard import Shard
from cluster.sharded_target.target_group import TargetGroup
from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost
from specdec_core.config import PairSpec
from specdec_core.drafting.pearl.asynchronous_draft import serve
from specdec_core.drafting.pearl.link import SocketLink

logger = logging.getLogger(__name__)
_CALLS = 8  # at the same time: for PEARL, for forwards, and those that lost their engine
LOADING = 600.0  # seconds that a draft may take to connect
ENDING = 5.0  # seconds that it may take to end after its link is closed


class Draft(Shard):
    """The draft's process: it drafts for PEARL, and runs the forwards of synchronous drafters. When
    it dies, Ray starts it again and repeats the call of :meth:`draft_for`, so that it connects to
    its engine again."""

    def __init__(self, spec: PairSpec) -> None:
        super().__init__(spec, "heads", 0, 1)
        _ = self.drafts  # loaded now, so that an error is known before anything waits for it

    def load(self, *_: Any) -> None:
        """Its models are loaded already."""

    def draft_for(self, host: str, port: int, key: bytes) -> None:
        """Draft for the engine at that address until the engine is gone. After an error, which is
        logged, or a cut connection, the draft connects again. Raises :class:`LinkLost` where no
        engine was reached."""
        served = False
        while True:
            try:
                serve(host, port, key, self.drafts)
            except LinkLost:
                if served:
                    return
                raise
            except Exception:
                logger.exception("drafting failed; it starts again")
                time.sleep(1)
            served = True


class PlacedDraft:
    """The draft on the device that `placed` has for it: its process, which starts when it is first
    needed, a link for PEARL, and a group for forwards of its models. `spec` has its device and data
    types resolved. Used in the engine's process, by every copy of a pair."""

    def __init__(self, placed: Placed, spec: PairSpec) -> None:
        self.placed, self.spec = placed, spec

    @cached_property
    def actor(self) -> ray.actor.ActorHandle:
        """The draft's process, once it has loaded its models."""
        options = self.placed.options("draft") | {"max_restarts": -1, "max_task_retries": -1}
        actor = start_actor(Draft, self.spec, **options, max_concurrency=_CALLS)
        get(actor.__ray_ready__.remote())
        return actor

    @cached_property
    def group(self) -> TargetGroup:
        """The draft's process for forwards of its models."""
        return TargetGroup(self.placed, self.spec, self.actor)

    @cached_property
    def _link(self) -> SocketLink:
        actor, host = self.actor, listening_address()
        link = SocketLink(host)
        self._served: ray.ObjectRef = actor.draft_for.remote(host, link.port, link.key)
        return link

    @property
    def losses(self) -> int:
        """How often its process was lost so far, as far as is known."""
        used, losses = vars(self), 0
        if "group" in used:
            losses += self.group.rebuilt
        if "_link" in used:
            losses += self._link.number - self._link.connected
        return losses

    def link(self) -> SocketLink:
        """The link, once the draft has connected.

        Raises:
            UserError: it could not.
        """
        waited = 0.0
        while not self._link.wait(1.0):
            waited += 1.0
            ready, _ = ray.wait([self._served], timeout=0)
            if ready:
                get(ready)
            if ready or waited > LOADING:
                raise UserError("the draft's process did not come")
        return self._link

    def close(self) -> None:
        used = vars(self)
        # The draft ends when its link is closed. Ray would report an interrupted call.
        if "_link" in used:
            self._link.close()
        if "group" in used:
            self.group.close()
        if "_link" in used:
            ray.wait([self._served], timeout=ENDING)
        if "actor" in used:
            ray.kill(self.actor)
