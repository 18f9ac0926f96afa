"""A sweep: profile → counts of every configuration in parallel → finalists timed alone → champion.

Counts of drafted, verified and discarded tokens do not depend on load, so Ray Tune gathers them on
all cores at once, and the profile turns them into estimated speedups. Times do depend on load, so
the finalists are timed in one process while nothing else runs, in turns with autoregressive
decoding on the same prompts.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher

from cluster.folder import SweepFolder
from cluster.observer import Observer, Observers
from cluster.plan import Plan
from cluster.ray_session import get, ray_session, resources
from cluster.timing import Stopwatch, start_bench
from cluster.trial import METRIC, PROMPTS_DONE, CountTrial, Task, assess
from specdec_core.config import Configuration
from specdec_core.pair import check_pair
from specdec_core.prompts import digest, load_prompts
from specdec_core.results import PromptSet, SweepResult, Timing, Trial
from specdec_core.search import Search, Suggester
from specdec_core.stats import rounds_frame

CHUNKS = 8  # looks that early stopping gets at a configuration


def run_sweep(
    plan: Plan,
    home: Path,
    name: str | None = None,
    fresh: bool = False,
    observers: Sequence[Observer] = (),
) -> tuple[SweepResult, SweepFolder]:
    """Run `plan` in `<home>/sweeps/<name>`, or go on where an interrupted run of it stopped.

    The name comes from the plan and the prompts, so the same call finds what it had begun; a
    finished sweep is run anew under the next name, and `fresh` leaves an unfinished one alone. The
    caller marks the folder finished once it has dealt with the result.

    Raises :class:`UserError` for bad input, before anything is written.
    """
    tell = Observers(observers)
    plan.check()
    tokenizer = check_pair(plan.pair)
    prompts = load_prompts(plan.prompts.source, plan.prompts.limit, tokenizer)
    prompt_set = PromptSet(source=plan.prompts.source, count=len(prompts), digest=digest(prompts))
    identity = plan.digest(prompt_set.digest)
    name = name or f"{plan.pair.name}-{identity[:8]}"
    folder = SweepFolder.claim(home / "sweeps", name, identity, fresh)
    if (result := folder.result()) is not None:
        tell.begun(result, prompts, folder.path)
        return result, folder

    tell.stage("connecting to Ray, loading the pair")
    with ray_session():
        runner = plan.pair.runner
        needs = resources(runner.threads, runner.device)
        bench = start_bench(folder.pair() or plan.pair, needs["GPU"])
        requests = get(bench.requests.remote(prompts, plan.max_new_tokens))
        with folder.lock():
            folder.begin(plan, identity)
            pair = get(bench.spec.remote())
            folder.save_pair(pair)
            profile = folder.profile()
            if profile is None:
                tell.stage("profiling forwards")
                options = plan.profile.model_dump(exclude_none=True)
                profile = get(bench.profile.remote(**options))
                folder.save_profile(profile)
            result = SweepResult(
                name=folder.name,
                started=datetime.now(UTC),
                pair=pair,
                prompts=prompt_set,
                max_new_tokens=plan.max_new_tokens,
                profile=profile,
                trials=folder.trials(),
                environment=get(bench.environment.remote()),
            )
            # The bench idles while trials count; only a GPU has to be given back meanwhile.
            if needs["GPU"]:
                ray.kill(bench)
            chunk = math.ceil(len(requests) / CHUNKS) if plan.early_stopping else len(requests)
            tell.begun(result, prompts, folder.path)
            _count(plan, Task(pair, profile, requests, chunk), needs, result, folder, tell)
            if needs["GPU"]:
                bench = start_bench(pair, needs["GPU"])
            _time(plan, bench, requests, result, folder, tell)
            ray.kill(bench)
            folder.save_rounds()
            result.save(folder.path)
    return result, folder


# Counting


def _count(
    plan: Plan,
    task: Task,
    needs: dict[str, float],
    result: SweepResult,
    folder: SweepFolder,
    tell: Observer,
) -> None:
    """Count every configuration that `folder` does not hold yet; fills `result.trials`."""
    done = {trial.id for trial in result.trials}
    param_space: dict[str, Any] = {}
    search_alg: Searcher | None = None
    known = plan.configurations()
    if known is not None:
        # Autoregressive decoding is counted where it is timed.
        wanted = [c for c in known if c != plan.autoregressive]
        pending = [c.model_dump_json() for c in wanted if c.id not in done]
        total, samples = len(wanted), int(bool(pending))
        param_space = {"configuration": tune.grid_search(pending)}
    else:
        total = plan.trials or 0
        search_alg, told = _optuna(plan, folder)
        samples = total - told
    tell.stage("counting", total, done=len(done - {plan.autoregressive.id}))
    record = _Record(result, folder, tell)
    if samples:
        scheduler: TrialScheduler | None = None
        if plan.early_stopping:
            scheduler = ASHAScheduler(
                time_attr=PROMPTS_DONE,
                max_t=len(task.requests),
                grace_period=task.chunk,
                reduction_factor=2,  # a few prompts are noisy: let the better half go on
            )
        with tempfile.TemporaryDirectory() as scratch:
            tune.Tuner(
                tune.with_resources(tune.with_parameters(CountTrial, task=task), needs),
                param_space=param_space,
                tune_config=tune.TuneConfig(
                    metric=METRIC,
                    mode="max",
                    search_alg=search_alg,
                    scheduler=scheduler,
                    num_samples=samples,
                    reuse_actors=True,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="counts",
                    # Tune's own state is not kept: the sweep's folder says what is done.
                    storage_path=scratch,
                    callbacks=[record],
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    failure_config=tune.FailureConfig(max_failures=1),
                    verbose=0,
                ),
            ).fit()
    if not result.trials:
        raise RuntimeError(f"no configuration could be counted: {record.error}")


class _Record(tune.Callback):
    """Writes each trial down as it finishes."""

    def __init__(self, result: SweepResult, folder: SweepFolder, tell: Observer) -> None:
        self.result, self.folder, self.tell = result, folder, tell
        self.rounds: dict[str, list[Any]] = {}
        self.error: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks to restore them; this one lives in the driver alone.
        return {}

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if result["training_iteration"] == 1:  # also when the trial had to start again
            self.rounds[trial.trial_id] = []
        self.rounds[trial.trial_id].append(result.pop("rounds"))

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        finished = Trial.model_validate_json(trial.last_result["trial"])
        rounds = pd.concat(self.rounds.pop(trial.trial_id), ignore_index=True)
        known = {t.id for t in self.result.trials}
        if finished.id not in known:  # Optuna may propose the same one twice
            self.tell.trial_finished(finished)
            self.folder.add_trial(finished, rounds)
            self.result.trials.append(finished)
        self.tell.step()

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        configuration = Configuration.model_validate_json(trial.config["configuration"])
        cause = trial.get_error() if hasattr(trial, "get_error") else None
        self.error = str(cause).strip().splitlines()[-1] if cause else "unknown error"
        self.tell.warned(f"{configuration.label} failed: {self.error}")
        self.tell.step()


@dataclass(frozen=True)
class _Suggest:
    """What Optuna proposes, as the configuration that a trial reads."""

    search: Search

    def __call__(self, trial: Suggester) -> dict[str, str]:
        return {"configuration": self.search.suggest(trial).model_dump_json()}


def _optuna(plan: Plan, folder: SweepFolder) -> tuple[Searcher, int]:
    """The searcher, and how many trials it has been told of before."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder.path / 'optuna.db'}")
    told = 0
    if optuna.get_all_study_names(storage):
        study = optuna.load_study(study_name=None, storage=storage)
        told = sum(trial.state.is_finished() for trial in study.trials)
    searcher = OptunaSearch(
        _Suggest(plan.space()),
        metric=METRIC,
        mode="max",
        # Resumed with the same seed it would draw the same points again.
        sampler=optuna.samplers.TPESampler(seed=plan.seed + told),
        storage=storage,
    )
    return searcher, told


# Timing


def _time(
    plan: Plan,
    bench: ray.actor.ActorHandle,
    requests: Sequence[Any],
    result: SweepResult,
    folder: SweepFolder,
    tell: Observer,
) -> None:
    """Time the finalists and count autoregressive decoding; fills `result.timings`, `.champion`
    and `.oracles`."""
    baseline = plan.autoregressive
    finalists = [trial.configuration for trial in choose_finalists(result.trials, plan.finalists)]
    contestants = [baseline, *finalists]
    tell.stage(f"timing {len(finalists)} finalists alone", plan.repeats * len(requests))
    get(bench.warm_up.remote(contestants, requests[0]))
    watch = Stopwatch()
    for repeat in range(plan.repeats):
        for request in requests:
            watch.take(bench, contestants, request, repeat)
            tell.step()
    if baseline.id not in {trial.id for trial in result.trials}:
        generations = watch.generations[baseline.id]
        trial = assess(baseline, generations, result.profile)
        tell.trial_finished(trial)
        folder.add_trial(trial, rounds_frame(generations, config_id=trial.id))
        result.trials.append(trial)
    result.autoregressive = watch.timing(baseline, baseline)
    result.timings = [watch.timing(finalist, baseline) for finalist in finalists]
    result.champion = choose_champion(contestants, watch, result)
    if plan.sampling.greedy:
        tell.stage("oracle")
        outputs = watch.outputs(baseline)
        result.oracles = get(bench.oracles.remote(result.profile, requests, outputs))


def choose_finalists(trials: Iterable[Trial], count: int) -> list[Trial]:
    """The best lossless trials by estimated speedup, with the best of every family first in line,
    so that the estimate alone does not decide between kinds of drafting. Best first."""
    candidates = [
        t
        for t in trials
        if t.finished and t.configuration.lossless and t.configuration.drafter is not None
    ]
    ranked = sorted(candidates, key=lambda t: t.metrics[METRIC], reverse=True)
    leaders: dict[str, Trial] = {}
    for trial in ranked:
        leaders.setdefault(trial.configuration.family, trial)
    chosen = [*leaders.values(), *(t for t in ranked if t not in leaders.values())][:count]
    return sorted(chosen, key=ranked.index)


def choose_champion(
    contestants: Sequence[Configuration], watch: Stopwatch, result: SweepResult
) -> str:
    """The fastest contestant, but autoregressive decoding, which comes first, where nothing is
    shown to beat it. Among those that cannot be told from the fastest, the one whose counts
    promise most: counts carry no noise. Marks in `result` who is tied with the champion."""
    baseline = contestants[0]

    def speedup(configuration: Configuration) -> float:
        return watch.timing(configuration, baseline).speedup

    def tied(one: Configuration, other: Configuration) -> bool:
        return one == other or watch.compare(one, other).tied

    fastest = max(contestants, key=speedup)
    equals = [c for c in contestants if tied(fastest, c)]
    if baseline in equals:
        champion = baseline
    else:
        champion = max(equals, key=lambda c: result.trial(c.id).metrics[METRIC])
    timed: list[Timing] = [t for t in (result.autoregressive, *result.timings) if t is not None]
    for timing in timed:
        other = result.trial(timing.config_id).configuration
        timing.tied_with_champion = other != champion and tied(champion, other)
    return champion.id
