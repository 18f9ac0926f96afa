"""A Tune trial: counts what some configurations draft, verify and discard on the prompts.

Counts do not depend on load, so trials run in parallel. The actor keeps the loaded pair, or the
recording, and runs one trial after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter
from ray import tune

from cluster.sweep.starting import started
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec
from specdec_core.cost import Profile
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair
from specdec_core.recordings.replay import Replay
from specdec_core.search.results import METRIC, Trial
from specdec_core.search.round_tables import RoundTable
from specdec_core.tokens.statistics import Counts, Generation, rounds_frame

PROMPTS_DONE = "prompts"

_CONFIGURATIONS = TypeAdapter(list[Configuration])
_TRIALS = TypeAdapter(list[Trial])


@dataclass(frozen=True)
class TrialTask:
    """The work that all trials of a sweep share. `chunk` is the number of prompts between two looks
    of the scheduler; `replay` holds the same prompts."""

    pair: PairSpec
    profile: Profile
    requests: tuple[Request, ...]
    chunk: int
    replay: Replay | None = None

    def replays(self, configuration: Configuration) -> bool:
        """Whether `configuration` can be replayed."""
        return self.replay is not None and self.replay.can(configuration)


def group(configurations: Sequence[Configuration]) -> str:
    """The `config["configurations"]` of a trial: several to replay, or one to decode."""
    return _CONFIGURATIONS.dump_json(list(configurations)).decode()


def grouped(config: dict[str, Any]) -> list[Configuration]:
    """The configurations of a trial."""
    return _CONFIGURATIONS.validate_json(config["configurations"])


def counted(result: dict[str, Any]) -> list[Trial]:
    """The configurations' documents in a trial's last result."""
    return _TRIALS.validate_json(result["trials"])


class CountTrial(tune.Trainable):
    """Replays the configurations in `config["configurations"]`, or decodes the prompts chunk by
    chunk under the only one.

    Every result holds the best estimate so far, the :class:`Trial` documents, and the rounds of
    the chunk where they were decoded; `failed` has a label and a reason for each configuration that
    could not be replayed.
    """

    def setup(self, config: dict[str, Any], task: TrialTask | None = None) -> None:
        assert task is not None
        self.task = task
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.configurations = grouped(new_config)
        self.generations: list[Generation] = []
        self.replays = all(map(self.task.replays, self.configurations))
        if not self.replays:
            (self.configuration,) = self.configurations
            self.engine.configure(self.configuration)
        return True

    @cached_property
    def engine(self) -> Engine:
        return Engine(load_pair(self.task.pair))

    def step(self) -> dict[str, Any]:
        if not self.configurations:
            return started(METRIC, PROMPTS_DONE)
        return self._replay() if self.replays else self._decode()

    def _replay(self) -> dict[str, Any]:
        assert self.task.replay is not None
        trials, failed = [], []
        for configuration in self.configurations:
            try:
                trials.append(replayed(self.task.replay, configuration, self.task.profile))
            except UserError as error:
                failed.append((configuration.label, str(error)))
        return _result(trials, len(self.task.requests), done=True, failed=failed)

    def _decode(self) -> dict[str, Any]:
        done = len(self.generations)
        chunk = self.engine.generate(self.task.requests[done : done + self.task.chunk])
        self.generations += chunk
        finished = len(self.generations) == len(self.task.requests)
        trial = assess(self.configuration, self.generations, self.task.profile)
        trial.finished = finished
        rounds = rounds_frame(chunk, config_id=trial.id)
        return _result([trial], len(self.generations), finished, rounds=RoundTable.of(rounds))


def _result(trials: list[Trial], prompts: int, done: bool, **more: Any) -> dict[str, Any]:
    return {
        METRIC: max((trial.metrics[METRIC] for trial in trials), default=0.0),
        PROMPTS_DONE: prompts,
        "trials": _TRIALS.dump_json(trials).decode(),
        "done": done,
        **more,
    }


def assess(configuration: Configuration, generations: list[Generation], profile: Profile) -> Trial:
    """Counts, rates, and the speedup that the profile predicts from them."""
    lengths = [(g.prompt_tokens, len(g.tokens)) for g in generations]
    prompts = [prompt for prompt, _ in lengths]
    counts, by_arm = Counts.of(generations), Counts.by_arm(generations)
    return Trial.of(configuration, counts, profile, middle(lengths), prompts, by_arm=by_arm.items())


def replayed(replay: Replay, configuration: Configuration, profile: Profile) -> Trial:
    """The same from a recording. Raises :class:`UserError` where it cannot be replayed."""
    rounds, context = replay.run(configuration), context_of(replay)
    prompts, by_arm = map(len, replay.recording.prompts.tokens), rounds.counts_by_arm()
    return Trial.of(configuration, rounds.counts, profile, context, prompts, True, by_arm.items())


def context_of(replay: Replay) -> int:
    """Tokens in the cache half-way through the recorded outputs, on average."""
    return replay.recording.prompts.context


def middle(lengths: Sequence[tuple[int, int]]) -> int:
    """Tokens in the cache half-way through generations of (prompt, output) tokens, on average."""
    return sum(prompt + output // 2 for prompt, output in lengths) // len(lengths)
