"""Live runs on a machine whose steps take as long as the test says."""

from pathlib import Path

import pandas as pd

from specdec_core.config import Configuration
from specdec_core.cost.forward import ForwardTerms
from specdec_core.cost.steps import StepTimes
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.records import LoadRecord, LoadRun
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load, Workload
from tests.specdec_core.recordings.recorded import replay_of

# Verification is nearly free, up to a dozen tokens or always.
UP_TO_A_DOZEN = StepTimes(
    target=ForwardTerms(fixed=0.01, per_token_beyond=0.003, knee=12),
    drafts={"draft": ForwardTerms(fixed=0.001)},
)
ALWAYS_FREE = StepTimes(
    target=ForwardTerms(fixed=0.01), drafts={"draft": ForwardTerms(fixed=0.001)}
)


def recorded(pair: Pair, folder: Path, new_tokens: int = 24) -> Replay:
    """The replay of a recording of four prompts."""
    return replay_of(pair, [f"x{i} = {i} + " for i in range(4)], folder / "trace", new_tokens)


class Machine:
    """Takes the simulation's steps, each as long as `times` say; tells what was taken."""

    def __init__(self, replay: Replay, workload: Workload, times: StepTimes) -> None:
        self.replay, self.times = replay, times
        self.traffic = Traffic.of(workload, replay.recording)
        self.taken: list[tuple[str, str]] = []  # loads and configurations

    def answer(self, configuration: Configuration, load: Load) -> LoadRun:
        self.taken.append((load.label, configuration.id))
        answers = replayed_answers(self.replay, configuration)
        return as_run(self.traffic.simulate(StepCosts(answers, self.times), load).records)


def as_run(records: pd.DataFrame) -> LoadRun:
    """Records of a simulation as a live run has them."""
    return [LoadRecord.model_validate(row) for row in records.to_dict("records")]
