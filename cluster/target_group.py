"""The target's shards as one: started together, asked together, built again when one is lost."""

from __future__ import annotations

import itertools
import logging
import pickle
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from transformers import AutoConfig

from cluster.placement import Placed
from cluster.ray_session import get
from cluster.shard import Call, Shard, ShardFacts
from cluster.shard_weights import check_split
from specdec_core.bundled import resolve_path
from specdec_core.config import PairSpec
from specdec_core.errors import UserError

if TYPE_CHECKING:
    from cluster.sharded_runner import ShardedRunner

logger = logging.getLogger(__name__)
# When an actor is gone Ray also tells in several tracebacks that its graph cannot be cancelled.
logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)

START_LIMIT = 120.0  # seconds that Ray may take to start the processes
ATTEMPTS = 3  # at building a group again, before its loss is an error


class ShardLost(Exception):
    """A shard ended while it was asked: the group must be built again."""


class TargetGroup:
    """The target of `spec` (data types resolved), a part of it on each device placed for it.

    `facts` say what each rank has; `rebuilt` counts how often a lost one made all start again.

    Raises:
        UserError: the model cannot be split like this.
    """

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
        self._refs: list[Any] | None = None
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
        if self._refs is not None:
            raise RuntimeError("the target's shards are still busy with another forward")
        message = pickle.dumps([*self._closed, *calls])
        self._closed.clear()
        try:
            if self._graph is not None:
                self._refs = self._graph.execute(message)
            else:
                self._refs = [shard.run.remote(message) for shard in self._shards]
        except RayError:
            self._refs = []

    def collect(self) -> Any:
        """The answer to the last call that was sent. Raises :class:`ShardLost`."""
        refs, self._refs = self._refs, None
        if not refs:
            raise ShardLost
        try:
            if self._graph is not None:
                # Ray's own limit would be 10 s; that a shard is gone is noticed without one.
                answers = [ref.get(timeout=-1) for ref in refs]
            else:
                answers = ray.get(refs)
        except Exception as error:
            # Ray tells a loss in many ways, not all of them its own: a survivor's collective fails.
            if not self._complete():
                raise ShardLost from error
            if isinstance(error, RayTaskError):
                raise error.as_instanceof_cause() from None
            raise
        return pickle.loads(next(answer for answer in answers if answer))

    def rebuild(self) -> None:
        """Start all shards again and give every runner's rows their tokens back."""
        for _ in range(ATTEMPTS):
            logger.warning("a shard of the target is gone; its group is built again")
            self.rebuilt += 1
            try:
                self._stop()
                self._start()
                for runner in list(self._runners):
                    runner.restore()
                return
            except (ShardLost, RayActorError):
                continue
        raise RuntimeError(f"the target's shards were lost {ATTEMPTS} times in a row")

    def close(self) -> None:
        """End the shards; the devices stay reserved."""
        self._stop()

    def _start(self) -> None:
        self._refs, self._graph = None, None
        actor = ray.remote(Shard)
        self._shards = [
            actor.options(**self.placed.options("target", rank)).remote(
                self.spec, self.split, rank, self.parts
            )
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
        self._graph = self._compile()

    def _compile(self) -> Any:
        """A compiled graph to every shard and back, about ten times as fast as calls of actors; or
        None where Ray cannot make one. Between nodes it makes one that never answered when tried.
        """
        here = ray.get_runtime_context().get_node_id()
        if any(fact.node != here for fact in self.facts):
            return None
        with InputNode() as message:
            graph = MultiOutputNode([shard.run.bind(message) for shard in self._shards])
        try:
            return graph.experimental_compile()
        except (RayError, ValueError, RuntimeError, NotImplementedError) as error:
            logger.warning("no compiled graph to the target's shards, plain calls: %s", error)
            return None

    def _complete(self) -> bool:
        """Whether every shard is there."""
        try:
            return all(ray.get([shard.alive.remote() for shard in self._shards]))
        except RayActorError:
            return False

    def _stop(self) -> None:
        for shard in self._shards:
            ray.kill(shard)
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None
