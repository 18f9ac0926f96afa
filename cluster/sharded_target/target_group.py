"""The target's shards as one: started together, asked together, built again when one is lost."""

from __future__ import annotations

import itertools
import logging
import select
import weakref
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from transformers import AutoConfig

from cluster.placement import Placed
from cluster.session import get, start_actor
from cluster.sharded_target.shard import Call, Failed, Shard, ShardFacts
from cluster.sharded_target.shard_weights import check_split
from specdec_core.base.bundled import resolve_path
from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost, Listener, Wire, dumps
from specdec_core.config import PairSpec

if TYPE_CHECKING:
    from cluster.sharded_target.sharded_runner import ShardedRunner

logger = logging.getLogger(__name__)

START_LIMIT = 120.0  # seconds that Ray may take to start the processes
ATTEMPTS = 3  # at building a group again, before its loss is an error
# One that fails may do so because another is gone: that is known within so many seconds.
GRACE = 1.0


class ShardLost(Exception):
    """A shard ended while it was asked: the group must be built again."""


class TargetGroup:
    """The target of `spec` (data types resolved), a part of it on each device placed for it.

    Every shard is asked over a socket of its own. `facts` say what each rank has; `rebuilt` counts
    how often a lost one made all start again.

    Raises:
        UserError: the model cannot be split like this.
    """

    _busy: bool
    _lost: bool
    _shards: list[ray.actor.ActorHandle]

    def __init__(self, placed: Placed, spec: PairSpec) -> None:
        target = placed.placement.target
        self.placed, self.spec = placed, spec
        self.parts, self.split = target.devices, target.split
        config = AutoConfig.from_pretrained(resolve_path(spec.target))
        check_split(config, spec.target, self.split, self.parts)
        if self.parts > 1 and spec.runner.compile:
            raise UserError("runner.compile: a target on several devices runs eagerly")
        self.facts: list[ShardFacts] = []
        self.rebuilt = 0
        self._numbers = itertools.count()
        self._runners: weakref.WeakSet[ShardedRunner] = weakref.WeakSet()
        self._closed: list[Call] = []
        self._start()

    def add(self, runner: ShardedRunner) -> int:
        """A number for a runner; its caches end with it."""
        number = next(self._numbers)
        self._runners.add(runner)
        weakref.finalize(runner, self._closed.append, (number, "close", ()))
        return number

    def ask(self, calls: Sequence[Call]) -> Any:
        """The answer to the last of `calls`. Raises :class:`ShardLost`."""
        self.submit(calls)
        return self.collect()

    def submit(self, calls: Sequence[Call]) -> None:
        """Send `calls` to every shard; :meth:`collect` waits for what comes back."""
        if self._busy:
            raise RuntimeError("the target's shards are still busy with another forward")
        message = dumps([*self._closed, *calls])
        self._closed.clear()
        self._busy = True
        try:
            for wire in self._wires.values():
                wire.send(message)
        except LinkLost:
            self._lost = True

    def collect(self) -> Any:
        """The answer to the last call that was sent. What a shard raised is raised here. Raises
        :class:`ShardLost`."""
        lost, self._lost, self._busy = self._lost, True, False  # until all is known to be well
        if lost:
            raise ShardLost
        failed: dict[int, Exception] = {}
        while len(failed) < self.parts:
            arrived = self._poll.poll(1e3 * GRACE if failed else None)
            if not arrived:
                break
            for number, _ in arrived:
                try:
                    answers = self._wires[number].receive()
                except LinkLost as error:
                    raise ShardLost from error
                for answer in answers:
                    if isinstance(answer, Failed):
                        if isinstance(answer.error, LinkLost):  # another is, or their wire
                            raise ShardLost from answer.error
                        failed[number] = answer.error
                    elif not failed:
                        self._lost = False
                        return answer
        # Where all have refused alike they are still in step; else some hang, or did what others
        # did not, and only a new group is to be trusted.
        self._lost = len(failed) < self.parts
        raise next(iter(failed.values()))

    def rebuild(self) -> None:
        """Start all shards again and give every runner's rows their tokens back."""
        reason: Exception | None = None
        for _ in range(ATTEMPTS):
            logger.warning("a shard of the target is gone; its group is built again")
            self.rebuilt += 1
            try:
                self._stop()
                self._start()
                for runner in list(self._runners):
                    runner.restore()
                return
            except (ShardLost, RayError) as error:
                reason = error
        raise RuntimeError(f"the target's shards were lost {ATTEMPTS} times in a row") from reason

    def close(self) -> None:
        """End the shards; the devices stay reserved."""
        self._stop()

    def _start(self) -> None:
        self._busy = self._lost = False
        self._wires: dict[int, Wire] = {}
        self._poll = select.poll()
        own = self.spec, self.split
        self._shards = [
            start_actor(Shard, *own, rank, self.parts, **self.placed.options("target", rank))
            for rank in range(self.parts)
        ]
        try:
            ray.get([shard.alive.remote() for shard in self._shards], timeout=START_LIMIT)
        except GetTimeoutError:
            self._stop()
            raise UserError(
                f"the target's {self.parts} devices were not to be had within {START_LIMIT:g} s:"
                " has a node left the cluster?"
            ) from None
        address = get(self._shards[0].address.remote()) if self.parts > 1 else None
        self.facts = get([shard.load.remote(address) for shard in self._shards])
        self._connect()

    def _connect(self) -> None:
        host = ray.util.get_node_ip_address()
        # All are sent the same bytes.
        with closing(Listener(encode=bytes, patience=None)) as listener:
            key = listener.key
            serving: list[ray.ObjectRef] = [
                shard.serve.remote(host, listener.port, key) for shard in self._shards
            ]
            while len(self._wires) < self.parts:
                if (wire := listener.accept(1.0)) is not None:
                    self._wires[wire.fileno()] = wire
                    self._poll.register(wire, select.POLLIN)
                elif ended := ray.wait(serving, timeout=0)[0]:
                    get(ended)
                    raise ShardLost

    def _stop(self) -> None:
        for wire in self._wires.values():
            wire.close()
        for shard in self._shards:
            ray.kill(shard)
