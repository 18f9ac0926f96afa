"""A policy chosen on some prompts of a recording, and reported on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specdec_core.base.errors import UserError
from specdec_core.config import AnyPolicy, Configuration, PolicySettings, Value
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.training.heads.examples import (
    DEV,
    HELD_OUT,
    TEST,
    TRAIN,
    hash_places,
    split_prompts,
)


class Modelled(Value):
    """A policy on the prompts of a recording that it was not chosen on: its replayed counts, timed
    by the profile."""

    policy: AnyPolicy
    speedup: float  # over autoregressive decoding
    latency: float  # seconds a token


def judging_prompts(
    prompts: Sequence[np.ndarray], trained: Sequence[np.ndarray] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the prompts that choose thresholds, and of the prompts that report: half and
    half by hash. `prompts` are tokens; a later turn has the tokens of its conversation's first
    turn, so that a conversation stays whole. Of prompts that heads were `trained` on, dev chooses
    and test reports.

    Raises:
        UserError: there are too few prompts.
    """
    split, places, fresh = split_prompts(prompts), hash_places(prompts), unseen(prompts, trained)
    rest = (split == TRAIN) & fresh
    first = places < 0.5 + HELD_OUT  # the middle of what is neither dev nor test
    choose = np.flatnonzero((split == DEV) | (rest & first))
    report = np.flatnonzero((split == TEST) | (rest & ~first))
    if not len(choose) or not len(report):
        raise UserError(
            "too few prompts to choose thresholds on some and report on others; heads were trained"
            f" on {int((~fresh).sum())} of the recording's {len(prompts)}"
        )
    return choose, report


def unseen(prompts: Sequence[np.ndarray], trained: Sequence[np.ndarray]) -> np.ndarray:
    """Which of `prompts` (n,) bool have tokens that none of the `trained` prompts has."""
    known = {np.asarray(tokens, np.int64).tobytes() for tokens in trained}
    return np.array([np.asarray(t, np.int64).tobytes() not in known for t in prompts], bool)


def prompt_seconds(
    rounds: ReplayedRounds, profile: Profile, configuration: Configuration, context: float
) -> np.ndarray:
    """Modelled seconds of each prompt (P,): SpecDec++'s Eq. 3.1, with the forwards' times at the
    widths that they have on average over all prompts; of a bandit's arms one by one."""
    seconds = np.zeros(len(rounds.ids))
    for arm, of_arm in rounds.by_arm().items():
        by_arm = configuration.by(arm)
        counts, cost = of_arm.counts, profile.under(by_arm)
        whole = cost.estimate_seconds(counts, by_arm.draft, context)
        undrafted = replace(counts, n_draft=0, n_draft_tokens=0)
        verifying = cost.estimate_seconds(undrafted, by_arm.draft, context)
        seconds += of_arm.by_prompt() * (verifying / max(counts.n_target, 1))
        seconds += of_arm.by_prompt(of_arm.draft_forwards) * (
            (whole - verifying) / max(counts.n_draft, 1)
        )
    return seconds


def chosen(
    replay: Replay,
    profile: Profile,
    draft: str,
    policies: Sequence[PolicySettings],
    prompts: tuple[np.ndarray, np.ndarray],
) -> Modelled:
    """The policy that is fastest on the first of `prompts`, as it does on the second."""
    choose, report = prompts
    context, sampling = replay.recording.prompts.context, replay.header.sampling
    tried = []
    for policy in policies:
        drafter = DraftModelSettings(draft=draft, policy=policy)
        configuration = Configuration(drafter=drafter, sampling=sampling)
        rounds = replay.run(configuration)
        tried.append((policy, rounds, prompt_seconds(rounds, profile, configuration, context)))
    policy, rounds, seconds = min(tried, key=lambda each: float(each[2][choose].sum()))
    tokens = int(rounds.by_prompt(rounds.generated)[report].sum())
    total = float(seconds[report].sum())
    return Modelled(
        policy=policy,
        speedup=profile.autoregressive_seconds(tokens, context) / total if total else 1.0,
        latency=total / max(tokens, 1),
    )
