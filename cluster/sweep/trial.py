"""A Tune trial: counts the draft, target and discarded tokens of configurations on the prompts.

Counts do not depend on load, so trials run in parallel. Each trial has a process, which keeps the
loaded pair or the recording and counts one configuration after another.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter
from ray import tune

from cluster.placed_engine import loaded_pair
from cluster.weights import OtherWeights, check_weights
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.cost import Profile
from specdec_core.engine import Engine, Request
from specdec_core.models.runner import CacheLost
from specdec_core.recordings.replay import Replay
from specdec_core.search.nearest import estimated
from specdec_core.search.results import METRIC, Trial
from specdec_core.tokens.statistics import Counts, Generation, rounds_frame

PROMPTS_DONE = "prompts"
REPORT = 1.0  # seconds of replay between two results

_CONFIGURATIONS = TypeAdapter(list[Configuration])


@dataclass(frozen=True)
class TrialTask:
    """The work that all trials of a sweep share. The scheduler may stop a configuration after each
    `chunk` prompts; `replay` holds the same prompts. What is decoded is decoded on the devices of
    `placement`, if any, or else by models with these `weights`, fingerprints by name."""

    pair: PairSpec
    profile: Profile
    requests: tuple[Request, ...]
    chunk: int
    replay: Replay | None = None
    placement: Placement | None = None
    weights: Mapping[str, str] = field(default_factory=dict)

    def replays(self, configuration: Configuration) -> bool:
        """Whether `configuration` can be replayed."""
        return self.replay is not None and self.replay.can(configuration)


@dataclass
class Counted:
    """What a trial has counted since its last result. Tune prints results into messages that are
    not shown, and printing a table takes longer than starting a trial."""

    trials: list[Trial] = field(default_factory=list, repr=False)
    failed: list[tuple[Configuration, str]] = field(default_factory=list)  # with the reasons
    rounds: bytes | None = field(default=None, repr=False)  # all so far, as Parquet, if decoded
    refused: str | None = None  # why nothing can be counted on this node


def group(configurations: Sequence[Configuration]) -> str:
    """The `config["configurations"]` of a trial."""
    return _CONFIGURATIONS.dump_json(list(configurations)).decode()


def grouped(config: dict[str, Any]) -> list[Configuration]:
    """The configurations of a trial."""
    return _CONFIGURATIONS.validate_json(config["configurations"])


class CountTrial(tune.Trainable):
    """Counts each of `config["configurations"]`: replays it, or decodes the prompts chunk by chunk.

    A result holds what was :class:`Counted`, and the best estimate of it.
    """

    def setup(self, config: dict[str, Any], task: TrialTask | None = None) -> None:
        assert task is not None
        self.task, self.held = task, ExitStack()
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.left = deque(grouped(new_config))
        self.generations: list[Generation] = []
        return True

    @cached_property
    def engine(self) -> Engine:
        # Configurations are counted one after another, so the models are loaded once.
        task = self.task
        pair = self.held.enter_context(loaded_pair(task.pair, task.placement))
        if task.placement is None:  # else the weights are in other processes
            check_weights(pair.spec, pair.fingerprints, task.weights, "the sweep")
        return Engine(pair)

    def cleanup(self) -> None:
        self.__dict__.pop("engine", None)
        self.held.close()

    def step(self) -> dict[str, Any]:
        counted = Counted()
        replays, end = self.task.replays(self.left[0]), time.monotonic() + REPORT
        prompts = len(self.task.requests)
        while self.left:
            configuration = self.left[0]
            try:
                if replays:
                    assert self.task.replay is not None
                    trial = estimated(configuration, self.task.replay, self.task.profile)
                else:
                    trial, counted.rounds = self._decode(configuration)
                    prompts = len(self.generations)
            except CacheLost:
                raise  # the trial is lost, and what it was counting is counted again
            except OtherWeights as error:
                counted.refused = str(error)
                break
            except Exception as error:
                told = isinstance(error, UserError)
                reason = str(error) if told else traceback.format_exception_only(error)[-1].strip()
                counted.failed.append((configuration, reason))
                if not told:
                    self.cleanup()  # the engine may hold unfinished requests
                self._next()
            else:
                counted.trials.append(trial)
                if trial.finished:
                    self._next()
            if not replays or time.monotonic() > end:
                break
        return {
            METRIC: max((trial.metrics[METRIC] for trial in counted.trials), default=0.0),
            PROMPTS_DONE: prompts,
            "counted": counted,
            "done": not self.left,
        }

    def _next(self) -> None:
        self.left.popleft()
        self.generations = []

    def _decode(self, configuration: Configuration) -> tuple[Trial, bytes]:
        """Decode a chunk of the prompts; the document and the rounds of all chunks."""
        done = len(self.generations)
        if not done:
            self.engine.configure(configuration)
            self.engine.wait_for_draft()
        with self.engine.pair.undisturbed():
            chunk = self.task.requests[done : done + self.task.chunk]
            self.generations += self.engine.generate(chunk)
        trial = assess(configuration, self.generations, self.task.profile)
        trial.finished = len(self.generations) == len(self.task.requests)
        rounds = rounds_frame(self.generations, config_id=trial.id)
        return trial, rounds.to_parquet(index=False)


def assess(configuration: Configuration, generations: list[Generation], profile: Profile) -> Trial:
    """Counts, rates, and the speedup that the profile predicts from them. Asynchronous drafting has
    the speedup of this decoding instead: its forwards overlap, so their times do not add up."""
    prompts = [g.prompt_tokens for g in generations]
    # Tokens in the cache half-way through a generation, on average.
    context = sum(g.prompt_tokens + len(g.tokens) // 2 for g in generations) // len(generations)
    counts, by_arm = Counts.of(generations), Counts.by_arm_and_width(generations)
    taken = sum(g.seconds for g in generations) if configuration.asynchronous else None
    return Trial.of(configuration, counts, profile, context, prompts, by_arm=by_arm, taken=taken)
