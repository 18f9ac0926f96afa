"""Counting the draft, target and discarded tokens of every configuration of a sweep, with Ray
Tune."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from sqlalchemy.exc import SQLAlchemyError

from cluster.session import room
from cluster.sweep.state import SweepState
from cluster.sweep.trial import PROMPTS_DONE, Counted, CountTrial, TrialTask, group, grouped
from specdec_core.base.errors import UserError
from specdec_core.base.files import needs_room
from specdec_core.base.uris import sqlite_uri
from specdec_core.config import Configuration
from specdec_core.cost import Profile
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.plan import ResolvedPlan
from specdec_core.search.results import METRIC, ORACLE, ReplaySummary, SweepResult
from specdec_core.search.space import Search

NOTHING: dict[str, float] = {"memory": 1}  # a byte, as Tune takes no empty needs
ATTEMPTS = 3  # to count a configuration that is lost with a trial's process or node


def count_all(sweep: SweepState, task: TrialTask, needs: dict[str, float]) -> None:
    """Count every configuration that the sweep's folder does not hold yet; fills its result's
    `.trials` and `.replay`. What is decoded runs in processes that need `needs`, or without any
    needs in a single one, which has its models on the devices of a placement. Raises
    :class:`UserError`, with the last reason, where none could be counted."""
    plan, result, observer = sweep.plan, sweep.result, sweep.observer
    done = {trial.id for trial in result.trials}
    record = _Record(sweep)
    counting = _Counting(plan, task, record)
    started, before = time.perf_counter(), sum(trial.replayed for trial in result.trials)
    if plan.configurations is None:
        search_alg, finished = _optuna(plan, task.profile, sweep.folder)
        total = plan.trials or 0
        observer.stage("counting", total, done=len(done - {plan.autoregressive.id}))
        if total > finished:
            counting.search(needs, search_alg, total - finished)
        replay_seconds = time.perf_counter() - started
        if plan.profile is not None and plan.autoregressive.id not in done:
            counting.each([plan.autoregressive], needs, plan.early_stopping)
    else:
        configurations = _counted(plan, task, observer)
        replayable = [c for c in configurations if task.replays(c)]
        others = [c for c in configurations if not task.replays(c)]
        pending = [c for c in replayable if c.id not in done]
        if replayable:
            observer.stage("replaying", len(replayable), done=len(replayable) - len(pending))
            counting.each(pending, {"CPU": 1}, early_stopping=False)
        replay_seconds = time.perf_counter() - started
        if others or not replayable:
            pending = [c for c in others if c.id not in done]
            observer.stage("counting", len(others), done=len(others) - len(pending))
            counting.each(pending, needs, plan.early_stopping)
    if task.replay is not None:
        result.replay = _summary(task, result, replay_seconds, before)
    if not result.trials:
        raise UserError(f"no configuration could be counted: {record.reason}")


def _counted(plan: ResolvedPlan, task: TrialTask, observer: SweepObserver) -> list[Configuration]:
    """The configurations to count, once each. Autoregressive decoding is only timed, unless the
    plan has another machine's profile."""
    distinct = {c.id: c for c in plan.configurations or () if c != plan.autoregressive}
    if plan.profile is not None:
        distinct[plan.autoregressive.id] = plan.autoregressive
    oracles = [c for c in distinct.values() if c.family == ORACLE and not task.replays(c)]
    if oracles:
        observer.warned(f"{oracles[0].label} left out: only a replay of a recording can follow it")
    return [c for c in distinct.values() if c not in oracles]


@dataclass(frozen=True)
class _Counting:
    """Runs a sweep's trials."""

    plan: ResolvedPlan
    task: TrialTask
    record: _Record

    def search(self, needs: dict[str, float], search_alg: Searcher, trials: int) -> None:
        """Count the configurations that a search proposes, each in a trial."""
        early = self.plan.early_stopping
        self._fit(needs, {}, early, search_alg=search_alg, num_samples=trials)
        self.each(self.record.take_lost(), needs, early)

    def each(
        self, configurations: Sequence[Configuration], needs: dict[str, float], early_stopping: bool
    ) -> None:
        """Count `configurations`. A configuration is counted again if its trial is lost.

        Every process that the cluster has room for gets one trial with its share of them: Tune
        gives further trials to the processes that are free, and stops those that still start.
        Where there is no room yet, one trial waits for a node. Each configuration has its own trial
        if the scheduler may stop it early, and if it was lost before: a configuration that ends its
        process must not end other trials."""
        for attempt in range(ATTEMPTS):
            if not configurations:
                return
            each_alone = early_stopping or attempt
            trials = len(configurations) if each_alone else max(room(needs), 1) if needs else 1
            mixed = random.Random(0).sample(configurations, len(configurations))
            groups = [group(mixed[i::trials]) for i in range(min(trials, len(mixed)))]
            self._fit(needs, {"configurations": tune.grid_search(groups)}, early_stopping)
            configurations = self.record.take_lost()
        for configuration in configurations:
            self.record.failed(configuration, self.record.reason)

    def _fit(
        self, needs: dict[str, float], space: dict[str, Any], early_stopping: bool, **tuning: Any
    ) -> None:
        if early_stopping:
            tuning["scheduler"] = ASHAScheduler(
                time_attr=PROMPTS_DONE,
                max_t=len(self.task.requests),
                grace_period=self.task.chunk,
                reduction_factor=2,  # a few prompts are noisy: the better half continues
            )
        trial = tune.with_parameters(CountTrial, task=self.task)
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
            needs_room(self.record.sweep.folder.path, any_file=True),
            self.record.refusing(),
        ):
            tune.Tuner(
                tune.with_resources(trial, needs or NOTHING),
                param_space=space,
                tune_config=tune.TuneConfig(
                    metric=METRIC,
                    mode="max",
                    reuse_actors=True,
                    max_concurrent_trials=None if needs else 1,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                    **tuning,
                ),
                run_config=tune.RunConfig(
                    name="counts",
                    # Tune's state is not kept: finished trials are in the sweep's folder.
                    storage_path=scratch,
                    callbacks=[self.record],
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    verbose=0,
                ),
            ).fit()


class _Record(tune.Callback):
    """Saves each configuration's counts as they are finished. Errors in doing so end the sweep."""

    def __init__(self, sweep: SweepState) -> None:
        self.sweep = sweep
        self.saved = {trial.id for trial in sweep.result.trials}
        self.lost: list[Configuration] = []
        self.reason = ""  # of the last error
        self.ids_failed: set[str] = set()
        self.refused: str | None = None  # why a node counts nothing, which ends the sweep

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks to restore them; this one lives in the driver alone.
        return {}

    # Not in on_trial_complete: Tune would treat its errors as errors of the trial.
    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        counted: Counted = result.pop("counted")  # before Tune writes the result
        if counted.refused is not None:
            self.refused = counted.refused
            raise UserError(self.refused)
        for finished in counted.trials:
            if not finished.finished and not result["done"]:
                continue
            if finished.id not in self.saved:  # Optuna may propose the same one twice
                self.saved.add(finished.id)
                self.sweep.add(finished, counted.rounds)
            self.sweep.observer.step()
        for configuration, reason in counted.failed:
            self.ids_failed.add(configuration.id)
            self.failed(configuration, reason)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """The trial's process is lost. Errors of configurations are in the trial's results."""
        self.reason = Path(trial.error_file).read_text().strip().splitlines()[-1]
        self.lost += [
            configuration
            for configuration in grouped(trial.config)
            if configuration.id not in self.saved | self.ids_failed
        ]

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """The refusal of a node, which Tune wraps, becomes a :class:`UserError` again."""
        try:
            yield
        except tune.TuneError:
            if self.refused is None:
                raise
            raise UserError(self.refused) from None

    def take_lost(self) -> list[Configuration]:
        """The configurations lost since the last call."""
        lost, self.lost = self.lost, []
        return lost

    def failed(self, configuration: Configuration, reason: str) -> None:
        self.reason = reason
        self.sweep.observer.warned(f"{configuration.label} failed: {reason}")
        self.sweep.observer.step()


def _summary(task: TrialTask, result: SweepResult, seconds: float, before: int) -> ReplaySummary:
    """`before` configurations had been replayed `seconds` ago."""
    assert task.replay is not None
    counts = [trial.counts for trial in result.trials if trial.replayed]
    return ReplaySummary(
        recording=str(task.replay.recording.folder.resolve()),
        configurations=len(counts),
        seconds=seconds,
        per_second=(len(counts) - before) / seconds,
        n_draft=sum(of_trial["n_draft"] for of_trial in counts),
        n_target=sum(of_trial["n_target"] for of_trial in counts),
    )


def _optuna(plan: ResolvedPlan, profile: Profile, folder: SweepFolder) -> tuple[Searcher, int]:
    """The searcher, which proposes the `config` of a trial, and how many trials it has finished
    before."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    file = folder.path / "optuna.db"
    try:
        storage = optuna.storages.RDBStorage(sqlite_uri(file))
    except (RuntimeError, SQLAlchemyError) as error:
        reason = str(getattr(error, "orig", error)).splitlines()[0]
        raise UserError(f"{file}: {reason}; delete it, and Optuna learns anew") from None
    finished = 0
    if optuna.get_all_study_names(storage):
        study = optuna.load_study(study_name=None, storage=storage)
        finished = sum(trial.state.is_finished() for trial in study.trials)

    searcher = OptunaSearch(
        partial(_suggested, plan.space, profile),  # Tune pickles it
        metric=METRIC,
        mode="max",
        # Resumed with the same seed it would draw the same points again.
        sampler=optuna.samplers.TPESampler(seed=plan.seed + finished),
        storage=storage,
    )
    return searcher, finished


def _suggested(space: Search, profile: Profile, trial: Any) -> dict[str, str]:
    return {"configurations": group([space.suggest(trial).priced(profile)])}
