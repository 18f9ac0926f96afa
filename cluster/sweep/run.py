"""A sweep: profile → counts of every configuration in parallel → finalists timed alone → champion.

Counts of drafted, verified and discarded tokens do not depend on load, so Ray Tune gathers them on
all cores at once: by replay where a recording of the prompts tells them, else by decoding. The
profile turns them into estimated speedups. Times do depend on load, so the finalists are timed in
one process while nothing else runs, in turns with autoregressive decoding on the same prompts.
With another machine's forward times there is nothing to time, and the best estimate wins.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import ray

from cluster.overlap import placed_bench
from cluster.placement import place
from cluster.session import check_nodes, get, ray_session, resources
from cluster.sweep.counting import count_all
from cluster.sweep.timing import Stopwatch, alone, lost, start_bench
from cluster.sweep.trial import Task, assess
from specdec_core.base.errors import UserError
from specdec_core.base.observer import together
from specdec_core.config import Configuration, PairSpec
from specdec_core.drafting.datastores.datastore import check_datastores
from specdec_core.models.pair import check_pair
from specdec_core.prompts.prompt_sets import PromptSet, digest, load_prompts
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.plan import Plan
from specdec_core.search.replaying import (
    asked_recording,
    open_replay,
    recorded_oracles,
    with_types_of,
)
from specdec_core.search.results import METRIC, SweepResult, Timing, Trial, by_estimate
from specdec_core.search.round_tables import Rounds
from specdec_core.tokens.statistics import Counts, rounds_frame

NEAR_TIES = 0.05  # what they can change of a configuration's forwards, at most
CHUNKS = 8  # looks that early stopping gets at a configuration


def run_sweep(
    plan: Plan,
    home: Path,
    name: str | None = None,
    fresh: bool = False,
    observers: Sequence[SweepObserver] = (),
) -> tuple[SweepResult, SweepFolder]:
    """Run `plan` in `<home>/sweeps/<name>`, or go on where an interrupted run of it stopped.

    The name comes from the plan and the prompts, so the same call finds what it had begun; a
    finished sweep is run anew under the next name, and `fresh` leaves an unfinished one alone. The
    caller marks the folder finished once it has dealt with the result.

    Raises :class:`UserError` for bad input, before anything is written.
    """
    tell = together(SweepObserver, observers)
    plan.check()
    tokenizer = check_pair(plan.pair)
    check_datastores(plan.samples(), tokenizer)
    prompts = load_prompts(plan.prompts.source, plan.prompts.limit, tokenizer)
    prompt_set = PromptSet(source=plan.prompts.source, count=len(prompts), digest=digest(prompts))
    identity = plan.digest(prompt_set.digest)
    name = name or f"{plan.pair.name}-{identity[:8]}"
    folder = SweepFolder.claim(home / "sweeps", name, identity, fresh)
    if (result := folder.result()) is not None:
        tell.begun(result, prompts, folder.path)
        return result, folder
    asked = asked_recording(plan, home, prompt_set.digest)
    pair = folder.pair() or with_types_of(asked, plan.pair)
    if with_types_of(asked, pair) != pair:
        raise UserError(
            f"{folder.path}: began in other data types than {plan.traces} was recorded in; give "
            "--fresh to start beside it"
        )

    tell.stage("connecting to Ray, loading the pair")
    with ray_session():
        check_nodes(plan.pair)
        if plan.cluster is not None:
            place(plan.cluster).remove()  # said now, not when everything has been counted
        runner = plan.pair.runner
        needs = resources(runner.threads, runner.device)
        bench = start_bench(pair, needs["GPU"])
        requests = get(bench.requests.remote(prompts, plan.max_new_tokens))
        pair = get(bench.spec.remote())
        fingerprints = get(bench.fingerprints.remote())
        replay = open_replay(
            plan, home, pair, fingerprints, asked, prompt_set.digest, len(requests)
        )
        with folder.lock():
            folder.begin(plan, identity)
            folder.save_pair(pair)
            profile = folder.profile()
            if plan.hardware is not None:
                profile = plan.hardware.profile(list(pair.drafts))
            if profile is None:
                with alone(bench, needs["GPU"], tell):
                    tell.stage("profiling forwards")
                    options = plan.profile.model_dump(exclude_none=True)
                    profile = get(bench.profile.remote(plan.samples(), **options))
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
                hardware=plan.hardware.name if plan.hardware else None,
            )
            # The bench idles while trials count; only a GPU has to be given back meanwhile.
            node = get(bench.node.remote())
            if needs["GPU"]:
                ray.kill(bench)
            chunk = math.ceil(len(requests) / CHUNKS) if plan.early_stopping else len(requests)
            tell.begun(result, prompts, folder.path)
            task = Task(pair, profile, requests, chunk, replay)
            count_all(plan, task, needs, result, folder, tell)
            tell.counted(result)
            if replay is not None:
                result.oracles = recorded_oracles(replay, profile)
            live: dict[str, pd.DataFrame] = {}
            if plan.hardware is not None:
                may_win = [t for t in result.trials if t.may_win(plan.allow_lossy)]
                result.champion = by_estimate(may_win)[0].id
            else:
                if needs["GPU"] or plan.cluster or lost(bench):
                    ray.kill(bench)
                    bench = None
                with _timing_bench(plan, pair, needs["GPU"], node, bench, tell) as bench:
                    live = _time(plan, bench, requests, result, folder, tell)
            ray.kill(bench)
            notable = [t for t in result.notable() if t.replayed and t.id not in live]
            folder.save_rounds([*live.values(), *_replayed_rounds(task, notable)])
            result.save(folder.path)
    return result, folder


def _replayed_rounds(task: Task, trials: Iterable[Trial]) -> list[pd.DataFrame]:
    """The rounds of replayed trials, where their recording is still there."""
    if task.replay is None:
        return []
    return [
        task.replay.run(trial.configuration).frame(config_id=trial.id)
        for trial in trials
        if task.replays(trial.configuration)
    ]


# Timing


@contextmanager
def _timing_bench(
    plan: Plan,
    pair: PairSpec,
    gpus: float,
    node: str,
    bench: ray.actor.ActorHandle | None,
    tell: SweepObserver,
) -> Iterator[ray.actor.ActorHandle]:
    """Where the finalists are timed, with nothing beside them: the plan's devices, or `bench`, or
    another one on `node`."""
    if plan.cluster is None:
        bench = bench or start_bench(pair, gpus, node)
        with alone(bench, gpus, tell):
            yield bench
        return
    with placed_bench(pair, plan.cluster) as (bench, held), alone(bench, gpus, tell, held):
        yield bench


def _time(
    plan: Plan,
    bench: ray.actor.ActorHandle,
    requests: Sequence[Any],
    result: SweepResult,
    folder: SweepFolder,
    tell: SweepObserver,
) -> dict[str, pd.DataFrame]:
    """Time the finalists and count autoregressive decoding; fills `result.timings`, `.champion`
    and, where no recording tells them, `.oracles`. Returns the rounds of finalists that had only
    been replayed."""
    baseline = plan.autoregressive
    chosen = choose_finalists(result.trials, plan.finalists, plan.allow_lossy)
    finalists = [trial.configuration for trial in chosen]
    kept_out = {m for t in result.trials for m in t.configuration.lossy_methods}
    if kept_out := sorted(kept_out - set(plan.allow_lossy)):
        names = ", ".join(kept_out)
        tell.warned(f"{names}: lossy, so counted but never the best (allow_lossy: [{names}])")
    finalists += [c for c in plan.configurations() or () if c.beside]
    contestants = [baseline, *finalists]
    tell.stage(f"timing {len(finalists)} finalists alone", plan.repeats * len(requests))
    get(bench.warm_up.remote(contestants, requests[0]))
    watch = Stopwatch()
    for repeat in range(plan.repeats):
        get(bench.forget.remote())  # every repeat does the same work
        for request in requests:
            watch.take(bench, contestants, request, repeat)
            tell.step()
    known = {trial.id for trial in result.trials}
    for uncounted in (c for c in contestants if c.id not in known):
        generations = watch.generations[uncounted.id]
        trial = assess(uncounted, generations, result.profile)
        tell.trial_finished(trial)
        folder.add_trial(trial, Rounds.of(rounds_frame(generations, config_id=trial.id)))
        result.trials.append(trial)
    result.autoregressive = watch.timing(baseline, baseline)
    result.timings = [watch.timing(finalist, baseline) for finalist in finalists]
    result.champion = choose_champion(contestants, watch, result)
    split = plan.cluster is not None and plan.cluster.target.devices > 1
    if plan.sampling.greedy and not result.oracles and not split:  # it takes a whole target
        tell.stage("oracle")
        outputs = watch.outputs(baseline)
        result.oracles = get(bench.oracles.remote(result.profile, requests, outputs))
    return _compare(watch, finalists, result, tell)


def _forwards(counts: Counts) -> int:
    return counts.n_draft + counts.n_target


def _compare(
    watch: Stopwatch, finalists: Sequence[Configuration], result: SweepResult, tell: SweepObserver
) -> dict[str, pd.DataFrame]:
    """Whether replayed finalists, decoded now, had the counts that the recording told; fills
    `result.replay`. Returns their rounds."""
    replayed = [c for c in finalists if result.trial(c.id).replayed]
    told = {c: Counts(**result.trial(c.id).counts) for c in replayed}
    live = {c: Counts.of(watch.generations[c.id]) for c in replayed}
    deviations = {
        c: abs(_forwards(live[c]) / max(_forwards(told[c]), 1) - 1)
        for c in replayed
        if live[c] != told[c]
    }
    if result.replay is not None:
        result.replay.checked = len(replayed)
        result.replay.equal = len(replayed) - len(deviations)
        result.replay.deviation = max(deviations.values(), default=0.0)
    # Near-ties between tokens flip where less than float32 is computed with.
    exact = {result.profile.target_dtype, result.profile.draft_dtype} == {"float32"}
    if doubtful := [c for c, d in deviations.items() if exact or d > NEAR_TIES]:
        tell.warned(
            f"replayed and live counts differ for {', '.join(c.label for c in doubtful)}; is the "
            "recording of these models and this machine?"
        )
    return {c.id: rounds_frame(watch.generations[c.id], config_id=c.id) for c in replayed}


def choose_finalists(
    trials: Iterable[Trial], count: int, allow_lossy: Collection[str] = ()
) -> list[Trial]:
    """The best trials by estimated speedup that may win, with the best of every family first in
    line, so that the estimate alone does not decide between kinds of drafting. Best first."""
    may_win = [t for t in trials if t.may_win(allow_lossy)]
    ranked = by_estimate(t for t in may_win if t.configuration.drafter is not None)
    leaders: dict[str, Trial] = {}
    for trial in ranked:
        leaders.setdefault(trial.configuration.family, trial)
    chosen = {trial.id: trial for trial in (*leaders.values(), *ranked)}
    return by_estimate([*chosen.values()][:count])


def choose_champion(
    contestants: Sequence[Configuration], watch: Stopwatch, result: SweepResult
) -> str:
    """The fastest contestant, but autoregressive decoding, which comes first, where nothing is
    shown to beat it. Among those that cannot be told from the fastest, the one whose counts
    promise most: counts carry no noise, but for those of drafts beside the target, of which the
    estimate knows nothing. Marks in `result` who is tied with the champion."""
    baseline = contestants[0]

    def speedup(configuration: Configuration) -> float:
        return watch.timing(configuration, baseline).speedup

    def tied(one: Configuration, other: Configuration) -> bool:
        return one == other or watch.compare(one, other).tied

    fastest = max(contestants, key=speedup)
    equals = [c for c in contestants if tied(fastest, c)]
    if baseline in equals:
        champion = baseline
    elif fastest.beside:
        champion = fastest
    else:
        counted = [c for c in equals if not c.beside]
        champion = max(counted, key=lambda c: result.trial(c.id).metrics[METRIC])
    timed: list[Timing] = [t for t in (result.autoregressive, *result.timings) if t is not None]
    for timing in timed:
        other = result.trial(timing.config_id).configuration
        timing.tied_with_champion = other != champion and tied(champion, other)
    return champion.id
