"""The target's shards as a group: started, called and, when one is lost, restarted together."""

from __future__ import annotations

import itertools
import logging
import select
import weakref
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from cluster.placement import Placed
from cluster.session import get, listening_address, start_actor
from cluster.sharded_target.board import Board
from cluster.sharded_target.messages import LARGEST, Call, ShardFailed, decode, encode
from cluster.sharded_target.shard import Shard
from cluster.sharded_target.shard_weights import check_target
from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost, Wire, WireListener
from specdec_core.config import PairSpec, TargetPlacement

logger = logging.getLogger(__name__)

# Seconds that Ray may take to start the processes. It may take ten minutes for their environment.
START_LIMIT = 900.0
ATTEMPTS = 3  # at restarting a group, before its loss is an error
# Seconds to wait, after a shard has failed, for the report that another is gone.
GRACE = 1.0


class ShardLost(Exception):
    """A shard has ended: the group must be restarted."""


class TargetGroup:
    """The target of `spec` (data types resolved), with a part on each device placed for it; or the
    `draft`'s process alone, which Ray starts again itself.

    Every shard has its own socket. `rebuilt` counts the restarts after a shard was lost.

    Raises:
        UserError: the model cannot be split like this.
    """

    _lost: bool
    _shards: list[ray.actor.ActorHandle]

    def __init__(
        self, placed: Placed, spec: PairSpec, draft: ray.actor.ActorHandle | None = None
    ) -> None:
        target = TargetPlacement() if draft is not None else placed.placement.target
        self.placed, self.spec, self.draft = placed, spec, draft
        self.parts, self.split = target.devices, target.split
        check_target(spec, target)
        self.rebuilt = 0
        self._numbers = itertools.count()
        self._closed: list[Call] = []
        self._start()

    def add(self, runner: object) -> int:
        """Number a runner. Its rows in the shards are freed when it is garbage-collected."""
        number = next(self._numbers)
        weakref.finalize(runner, self._closed.append, (number, "close", ()))
        return number

    def ask(self, calls: Sequence[Call]) -> Any:
        """Send `calls` to every shard; the answer to the last of them. Raises what a shard raised.

        Raises:
            ShardLost: a shard has ended, now or before.
        """
        if self._lost:
            raise ShardLost
        self._lost = True  # until there is an answer
        message = encode([*self._closed, *calls])
        self._closed.clear()
        try:
            for wire in self._wires.values():
                wire.send(message)
        except LinkLost as error:
            raise ShardLost from error
        failed: dict[int, Exception] = {}
        while len(failed) < self.parts:
            arrived = self._poll.poll(1e3 * GRACE if failed else None)
            if not arrived:
                break
            for number, _ in arrived:
                try:
                    answers = [decode(data) for data in self._wires[number].receive()]
                except LinkLost as error:
                    raise ShardLost from error
                for answer in answers:
                    if isinstance(answer, ShardFailed):
                        if isinstance(answer.error, LinkLost):  # another is, or their wire
                            raise ShardLost from answer.error
                        failed[number] = answer.error
                    elif not failed:
                        self._lost = False
                        return answer
        # If all shards have failed, they are in the same state. Otherwise some shards wait, or have
        # made calls that failed elsewhere, and the group must be restarted.
        self._lost = len(failed) < self.parts
        raise next(iter(failed.values()))

    def rebuild(self) -> None:
        """Restart all shards, with the rows of no runner."""
        reason: Exception | None = None
        for _ in range(ATTEMPTS):
            logger.warning("a process of the models is gone; restarting its group")
            self.rebuilt += 1
            try:
                self.close()
                self._start()
                return
            except (ShardLost, RayError) as error:
                reason = error
        raise RuntimeError(f"the target's shards were lost {ATTEMPTS} times in a row") from reason

    def _start(self) -> None:
        self._lost = True  # until all shards are connected
        self._wires: dict[int, Wire] = {}
        self._poll = select.poll()
        self._shards = [self.draft] if self.draft is not None else self._started()
        try:
            ray.get([shard.__ray_ready__.remote() for shard in self._shards], timeout=START_LIMIT)
        except GetTimeoutError:
            self.close()
            raise UserError(
                f"the target's {self.parts} devices did not start within {START_LIMIT:g} s: has a"
                " node left the cluster?"
            ) from None
        if self.parts == 1:
            get(self._shards[0].load.remote())
        else:
            addresses = get([shard.address.remote() for shard in self._shards])
            board = start_actor(Board, num_cpus=0)  # ends when its handle is gone
            get([shard.load.remote(addresses, board) for shard in self._shards])
        self._connect()
        self._lost = False

    def _started(self) -> list[ray.actor.ActorHandle]:
        arguments = [(self.spec, self.split, rank, self.parts) for rank in range(self.parts)]
        return [
            start_actor(Shard, *given, **self.placed.options("target", rank))
            for rank, given in enumerate(arguments)
        ]

    def _connect(self) -> None:
        with closing(WireListener(listening_address(), LARGEST, patience=None)) as listener:
            address = listener.host, listener.port, listener.key
            serving: list[ray.ObjectRef] = [shard.serve.remote(*address) for shard in self._shards]
            while len(self._wires) < self.parts:
                if (wire := listener.accept(1.0)) is not None:
                    self._wires[wire.fileno()] = wire
                    self._poll.register(wire, select.POLLIN)
                elif ended := ray.wait(serving, timeout=0)[0]:
                    get(ended)
                    raise ShardLost

    def close(self) -> None:
        """End the shards; the devices stay reserved."""
        for wire in self._wires.values():
            wire.close()
        if self.draft is None:
            for shard in self._shards:
                ray.kill(shard)
