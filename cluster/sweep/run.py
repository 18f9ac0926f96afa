"""A sweep: profile → counts of every configuration in parallel → finalists timed alone → champion.

Counts of draft, target and discarded tokens do not depend on load, so Ray Tune gathers them on all
cores at once: by replay where a recording of the prompts has them, else by decoding. The profile
turns them into estimated speedups. Times depend on load, so the finalists are timed in one process
while nothing else runs, interleaved with autoregressive decoding on the same prompts. With another
machine's profile nothing is timed, and the best estimate wins. For a workload, the finalists
at each of its loads are timed as well, where a recording was replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import pandas as pd
from ray.exceptions import RayActorError

from cluster.placed_engine import check_placement
from cluster.session import Remote, check_nodes, ray_session, resources
from cluster.sweep.alone import alone
from cluster.sweep.counting import count_all
from cluster.sweep.finalists import time_finalists
from cluster.sweep.measuring import open_measuring
from cluster.sweep.state import SweepState
from cluster.sweep.trial import TrialTask
from cluster.sweep.workload import choose_for_workload
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import remember
from specdec_core.config import PairSpec
from specdec_core.cost import Profile
from specdec_core.drafting.trained import trained_digests, weights_here
from specdec_core.engine import Request
from specdec_core.measure.losses import Found, again_if_lost
from specdec_core.models.pair import check_pair
from specdec_core.models.runner import CacheLost
from specdec_core.prompts.prompt_sets import Prompt, PromptSet
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.plan import ResolvedPlan
from specdec_core.search.replaying import (
    fitting_recording,
    nothing_fits,
    open_replay,
    other_forwards,
    recorded_oracles,
    recording_of,
    with_types_of,
)
from specdec_core.search.results import SweepResult, by_estimate

CHUNKS = 8  # looks that early stopping gets at a configuration


def run_sweep(
    plan: ResolvedPlan,
    home: Path,
    name: str | None = None,
    fresh: bool = False,
    observer: SweepObserver | None = None,
) -> tuple[SweepResult, SweepFolder]:
    """Run `plan` in `<home>/sweeps/<name>`, or resume the interrupted run in this folder.

    The default name depends on the plan and the prompts, so the same call resumes its sweep. A
    finished sweep runs again under the next name; with `fresh`, so does an unfinished one. The
    caller marks the folder finished once it has used the result.

    Raises :class:`UserError` for bad input, before anything is written.
    """
    observer = observer or SweepObserver()
    if plan.profile is not None:
        plan.profile.check(plan.pair.drafts, "profile")
        if plan.profile.proposals:
            raise UserError(
                "profile: of a server: --engine sweeps that server, and `specdec export --fastest`"
                " ranks its settings"
            )
    tokenizer = check_pair(plan.pair)
    if plan.cluster is not None:
        check_placement(plan.pair, plan.cluster, plan.samples)
    asked = plan.prompts
    loaded = asked.load(tokenizer, plan.race.further)
    prompts, further = loaded[: asked.limit], loaded[len(loaded[: asked.limit]) :]
    prompt_set = asked.described(prompts)
    identity = plan.digest(prompt_set.digest)
    name = name or f"{plan.pair.name}-{identity[:8]}"
    folder = SweepFolder.claim(home / "sweeps", name, identity, fresh)
    if (result := folder.result(SweepResult)) is not None:
        folder.check_weights(weights_here(plan.pair, plan.samples))
        observer.begun(result, prompts, folder.path)
        return result, folder
    recording = recording_of(plan, home, prompt_set.digest)
    types_of = recording or fitting_recording(plan, home, prompt_set.digest)
    pair = pair_of(plan, folder, types_of)
    observer.stage("connecting to Ray, loading the pair")
    with ray_session(), closing(_Sweep(plan, folder, observer, pair)) as sweep:
        sweep.load(home, prompts, further, prompt_set, recording)
        with folder.lock():
            remember(home)
            sweep.begin(identity, prompt_set)
            observer.begun(sweep.result, prompts, folder.path)
            if sweep.result.champion is None:
                sweep.count()
            sweep.choose()
            sweep.result.save(folder.path)
    return sweep.result, folder


def pair_of(plan: ResolvedPlan, folder: SweepFolder, recording: Recording | None) -> PairSpec:
    """The pair in the data types that the sweep began in, or else in the recording's."""
    if (begun := folder.pair()) is not None:  # it may name places from before a move
        pair = plan.pair.model_copy(update={"runner": begun.runner})
    else:
        pair = with_types_of(recording, plan.pair)
    if plan.traces is not None and with_types_of(recording, pair) != pair:
        raise UserError(
            f"{folder.path}: began in other data types than {plan.traces} was recorded in; give "
            "--fresh to start beside it"
        )
    return pair


class _Sweep(SweepState):
    """A running sweep. Its result is there from :meth:`begin` on."""

    profile: Profile
    requests: tuple[Request, ...]
    further: tuple[Request, ...]  # beyond the sweep's, for a race that they may decide
    replay: Replay | None
    weights: dict[str, str]  # digests of models, heads and saved states

    def __init__(
        self, plan: ResolvedPlan, folder: SweepFolder, observer: SweepObserver, pair: PairSpec
    ) -> None:
        self.plan, self.folder, self.observer, self.pair = plan, folder, observer, pair
        check_nodes(plan.pair)
        needs = resources(plan.pair.runner.threads, plan.pair.runner.device)
        self.gpus = needs["GPU"]
        # Every trial loads the pair, unless that takes the devices of the placement.
        split = plan.cluster is not None and plan.cluster.target.devices > 1
        self.placement = plan.cluster if split or plan.drafts_apart else None
        self.needs = needs if self.placement is None else {}
        self.node: str | None = None
        self.loaded = ExitStack()  # the measuring process, if it is
        self._load_pair()
        self.node = self.measuring.node()

    def _load_pair(self) -> None:
        """Load the pair in a process that measures, or on the devices of the plan's placement."""
        self.measuring, self.placed = self.loaded.enter_context(
            open_measuring(self.pair, self.plan.cluster, self.gpus, self.node)
        )

    def close(self) -> None:
        self.loaded.close()

    def load(
        self,
        home: Path,
        prompts: Sequence[Prompt],
        further: Sequence[Prompt],
        prompt_set: PromptSet,
        recording: Recording | None,
    ) -> None:
        """Load the prompts' tokens, the pair's data types, and a recording of them."""
        tokens = self.plan.max_new_tokens
        self.requests = self.measuring.requests(prompts, tokens)
        self.further = self.measuring.fitting(further, tokens, len(self.requests))
        self.pair = self.measuring.spec()
        fingerprints = self.measuring.fingerprints()
        self.weights = fingerprints | trained_digests(self.plan.samples)
        count = len(self.requests)
        self.replay = open_replay(
            self.plan, home, self.pair, fingerprints, recording, prompt_set.digest, count
        )
        if self.replay is None:
            if self.plan.replay and self.plan.sampling.fixed_output:
                self.observer.warned(nothing_fits(home, tokens))
            return
        recording = self.replay.recording
        # In a near-tie the target may answer an earlier turn otherwise than it was recorded.
        self.requests = tuple(
            replace(request, tokens=tuple(tokens.tolist()))
            for request, tokens in zip(self.requests, recording.prompts.tokens, strict=True)
        )
        other = recording.header.pair.runner.compile != self.pair.runner.compile
        if other and self.plan.profile is None:
            self.observer.warned(other_forwards(recording))

    def begin(self, identity: str, prompt_set: PromptSet) -> None:
        """Write the plan, the pair and the profile. Make the result, or read that of a sweep that
        was interrupted under its workload. Raises :class:`UserError` where the sweep began with
        other weights, or on another machine whose times it kept."""
        self.folder.keep_weights(self.weights)
        if self.plan.profile is None:  # else nothing is timed
            self.folder.keep_machine(self.measuring.machine())
        self.folder.begin(self.plan.given, identity)
        self.folder.save_pair(self.pair)
        self.profile = self._profile()
        self.folder.save_profile(self.profile)
        self.plan = self.plan.priced(self.profile)
        if (timed := self.folder.timed()) is not None:
            self.result = timed
            return
        self.result = SweepResult(
            name=self.folder.name,
            started=datetime.now(UTC),
            pair=self.pair,
            prompts=prompt_set,
            max_new_tokens=self.plan.max_new_tokens,
            profile=self.profile,
            trials=self.folder.trials(),
            environment=self.measuring.environment(),
            hardware=self.plan.profile.device if self.plan.profile else None,
        )

    def _profile(self) -> Profile:
        """Another machine's profile, or else this one's, measured once."""
        if self.plan.profile is not None:
            return self.plan.profile.of(self.pair.drafts)
        if (profile := self.folder.profile()) is not None:
            return profile

        def measure() -> Profile:
            self.observer.stage("profiling forwards")
            options = self.plan.forwards.model_dump(exclude_none=True)
            return self.measuring.profile(self.plan.samples, **options)

        return self._measure_alone(measure)

    def _measure_alone(self, measure: Callable[[], Found]) -> Found:
        """What `measure` returns, while the nodes of the measuring process do nothing else. It is
        called again if that, which is then loaded again, or another process of the models is
        lost."""

        def once() -> Found:
            if self.measuring.lost:
                self.loaded.close()
                self._load_pair()
            try:
                with alone(self.measuring, self.gpus, self.observer, self.placed):
                    return measure()
            except RayActorError:
                raise CacheLost("the measuring process was lost") from None

        return again_if_lost(once, self.observer)

    @cached_property
    def task(self) -> TrialTask:
        """The task that all trials share."""
        count = len(self.requests)
        chunk = math.ceil(count / CHUNKS) if self.plan.early_stopping else count
        shared = self.pair, self.profile, self.requests, chunk, self.replay
        return TrialTask(*shared, self.placement, self.weights)

    def count(self) -> None:
        """Count every configuration: in parallel, or one after another on the devices of a
        placement."""
        if self.gpus or self.plan.cluster:  # which the idle process would keep from the trials
            self.loaded.close()
        count_all(self, self.task, self.needs)
        if self.replay is not None:
            self.result.oracles = recorded_oracles(self.replay, self.profile)

    def choose(self) -> None:
        """Choose the champion, and configurations for the loads of a workload: by times taken
        alone, or for another machine by estimate."""
        if self.plan.profile is not None:
            may_win = [t for t in self.result.trials if t.may_win(self.plan.allow_lossy)]
            self.result.champion = by_estimate(may_win)[0].id
            self._write_rounds({})
            self._choose_for_load(None)
            return

        def choose_live() -> None:
            if self.result.champion is None:
                timed = time_finalists(self, self.measuring, self.requests, self.further)
                self._write_rounds(timed)
                if self.plan.workload is not None:  # more is to come
                    self.folder.save_timed(self.result)
            self._choose_for_load(self.measuring)

        self._measure_alone(choose_live)

    def _choose_for_load(self, measuring: Remote | None) -> None:
        if self.replay is not None:
            choose_for_workload(self, self.replay, measuring)

    def _write_rounds(self, timed: Mapping[str, pd.DataFrame]) -> None:
        """Write the rounds of notable trials. `timed` has the rounds of finalists that were decoded
        to be timed, after a replay."""
        replay, notable = self.replay, self.result.notable()
        replayed = [t for t in notable if t.replayed and t.id not in timed]
        frames = [
            replay.run(trial.configuration).frame(config_id=trial.id)
            for trial in replayed
            if replay is not None and replay.can(trial.configuration)
        ]
        self.folder.save_rounds([*timed.values(), *frames])
