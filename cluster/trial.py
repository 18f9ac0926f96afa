"""A Tune trial: what does one configuration draft, verify and discard on the prompts?

Counts do not depend on load, so trials run side by side. The actor keeps the loaded pair and is
used for one configuration after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray import tune

from specdec_core.config import Configuration, PairSpec
from specdec_core.cost import Profile
from specdec_core.engine import Engine, Request
from specdec_core.pair import load_pair
from specdec_core.results import Trial
from specdec_core.stats import Counts, Generation, rounds_frame

METRIC = "estimated_speedup"
PROMPTS_DONE = "prompts"


@dataclass(frozen=True)
class Task:
    """What all trials of a sweep share. `chunk` is how many prompts are decoded between two
    looks of the scheduler."""

    pair: PairSpec
    profile: Profile
    requests: tuple[Request, ...]
    chunk: int


class CountTrial(tune.Trainable):
    """Decodes the prompts chunk by chunk under `config["configuration"]` (JSON).

    Every result holds the metrics so far, the :class:`Trial` document and the chunk's rounds.
    """

    def setup(self, config: dict[str, Any], task: Task | None = None) -> None:
        assert task is not None
        self.task = task
        self.engine = Engine(load_pair(task.pair))
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.configuration = Configuration.model_validate_json(new_config["configuration"])
        self.engine.configure(self.configuration)
        self.generations: list[Generation] = []
        return True

    def step(self) -> dict[str, Any]:
        done = len(self.generations)
        chunk = self.engine.generate(self.task.requests[done : done + self.task.chunk])
        self.generations += chunk
        finished = len(self.generations) == len(self.task.requests)
        trial = assess(self.configuration, self.generations, self.task.profile)
        trial.finished = finished
        return {
            METRIC: trial.metrics[METRIC],
            PROMPTS_DONE: len(self.generations),
            "trial": trial.model_dump_json(),
            "rounds": rounds_frame(chunk, config_id=trial.id),
            "done": finished,
        }


def assess(configuration: Configuration, generations: list[Generation], profile: Profile) -> Trial:
    """Counts, rates, and the speedup that the profile predicts from them."""
    counts = Counts.of(generations)
    draft = getattr(configuration.drafter, "draft", None)
    lengths = [g.prompt_tokens + len(g.tokens) // 2 for g in generations]
    estimate = profile.speedup(counts, draft, context=sum(lengths) // len(lengths))
    return Trial(
        configuration=configuration,
        counts=counts.as_dict(),
        metrics={**counts.metrics(), METRIC: estimate},
    )
