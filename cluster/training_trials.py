"""Trainings as Ray Tune trials: what finishes or goes on is kept outside Tune's own storage."""

from __future__ import annotations

import tempfile
from typing import Any

from ray import tune

from cluster.session import ray_session
from specdec_core.base.files import needs_room


class TrialRecord(tune.Callback):
    """Why trials failed, by their label: `config[key]["label"]`, where `key` is the one parameter
    of the search."""

    key: str

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks to restore them; this one lives in the driver alone.
        return {}

    def label(self, trial: Any) -> str:
        """A trial's label."""
        label: str = trial.config[self.key]["label"]
        return label

    def why(self, label: str) -> str:
        """Why a trial that left nothing failed."""
        return self.errors.get(label, "its worker was lost")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        cause = trial.get_error() if hasattr(trial, "get_error") else None
        error = str(cause).strip().splitlines()[-1] if cause else "unknown error"
        self.errors[self.label(trial)] = error


def run_trials(
    trainable: Any,
    needs: dict[str, float],
    configs: list[Any],
    record: TrialRecord,
    **search: Any,
) -> None:
    """Run `trainable` with each of `configs`, on what each `needs`; `search` are further settings
    of `tune.TuneConfig`. A trial that was lost is tried once more."""
    with (
        ray_session(),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        needs_room(scratch, others=True),
    ):
        tune.Tuner(
            tune.with_resources(trainable, needs),
            param_space={record.key: tune.grid_search(configs)},
            tune_config=tune.TuneConfig(
                trial_dirname_creator=lambda trial: trial.trial_id, **search
            ),
            run_config=tune.RunConfig(
                name="training",
                storage_path=scratch,
                callbacks=[record],
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                failure_config=tune.FailureConfig(max_failures=1),
                verbose=0,
            ),
        ).fit()
