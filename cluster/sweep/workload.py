"""A sweep's workload: the configuration for each load, and for all of them together."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from cluster.session import Remote
from cluster.sweep.state import SweepState
from specdec_core.base.files import write_atomically
from specdec_core.config import Configuration
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import configurations_by_load
from specdec_core.search.load.choice import choose_for_load
from specdec_core.search.load.decoded import (
    can_simulate,
    kept_rounds,
    recorded_requests,
    with_decoded,
)
from specdec_core.search.load.schedule import drafter_at
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.results import by_estimate
from specdec_core.tokens.statistics import rounds_frame


def choose_for_workload(sweep: SweepState, replay: Replay, measuring: Remote | None) -> None:
    """Choose a configuration for each load of the plan's workload, from the counted ones, by
    replayed or decoded rounds. Fills the result's `.under_load`, and adds the configuration for all
    loads to its `.trials`. Without a measuring process, for another machine, the choice is by
    simulation alone."""
    plan, result, folder, observer = sweep.plan, sweep.result, sweep.folder, sweep.observer
    if plan.workload is None:
        return
    may_win = [t.configuration for t in by_estimate(result.trials) if t.may_win(plan.allow_lossy)]
    replay = _with_decoded(sweep, replay, may_win, measuring)
    candidates = [each for each in may_win if can_simulate(replay, each)]
    if left_out := [each.label for each in may_win if each not in candidates]:
        observer.warned(f"not simulated, so chosen for no load: {', '.join(left_out)}")
    if all(each.drafter is None for each in candidates):
        return
    if measuring is not None:
        measuring.take_workload(Traffic.of(plan.workload, replay.recording))
    choice, simulated = choose_for_load(
        candidates,
        replay,
        result.profile,
        plan.workload,
        plan.live,
        measuring,
        folder.path / "live",
        observer,
    )
    write_atomically(folder.path / "simulated.csv", simulated.to_csv(index=False))
    result.under_load = choice
    if all(trial.id != choice.chosen.id for trial in result.trials):
        # A single request gets the drafter of the first range.
        alone = drafter_at(choice.chosen, 1)
        counted = next(t for t in result.trials if t.configuration.drafter == alone)
        update = {"configuration": choice.chosen}
        result.trials.append(counted.model_copy(update=update))


def _with_decoded(
    sweep: SweepState,
    replay: Replay,
    candidates: Sequence[Configuration],
    measuring: Remote | None,
) -> Replay:
    """The replay with the rounds of the candidates that cannot be replayed. The rounds of a
    candidate were decoded to count it. A range of a schedule that is no candidate is decoded by
    the measuring process; without one the schedule is left out."""
    counted = {t.id for t in sweep.result.trials if t.finished and not t.replayed}
    if measuring is None:
        candidates = [
            each
            for each in candidates
            if all(c.id in counted or replay.can(c) for c in configurations_by_load(each))
        ]

    def decode(configuration: Configuration) -> pd.DataFrame:
        assert measuring is not None
        measuring.forget()
        requests = recorded_requests(replay.recording)
        return rounds_frame([measuring.decode(configuration, each)[1] for each in requests])

    kept = kept_rounds(replay.recording, decode)

    def rounds(configuration: Configuration) -> pd.DataFrame:
        if configuration.id in counted:
            return sweep.folder.rounds(configuration.id)
        return kept(configuration)

    return with_decoded(replay, candidates, rounds, sweep.observer)
