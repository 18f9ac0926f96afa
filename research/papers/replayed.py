"""What existing studies compute from recordings, as tables of the papers: policies against the
oracle, bandits against their best arm, trees by shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from research.bandits.comparison import ArmComparison, ArmsPlan, replay_all, settings_of
from research.bandits.regret import exp3_bound, mean_tokens, tgd_lower_bound, ucb_bound
from research.frames import Rows, framed
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, parse
from specdec_core.cost import Profile
from specdec_core.drafting.heads.storage import load_head
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.results import METRIC, ORACLE, SECONDS, Trial, by_estimate

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
POLICIES: tuple[dict[str, Any], ...] = (
    *({"kind": "fixed", "max_tokens": k} for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14)),
    *({"kind": "confidence_product", "threshold": h} for h in THRESHOLDS),
    *({"kind": "svip", "threshold": h, "max_tokens": 20} for h in (0.3, 0.6, 0.9, 1.2, 1.5)),
    {"kind": "oracle"},
)
FIXED = "fixed"  # the family
RATES = ("discard_rate", "verification_rate", "mat", "acceptance_rate")
LENGTH = 4  # K of a bandit's arm that drafts with a model
ARMS: tuple[dict[str, Any], ...] = (
    {"kind": "prompt_lookup"},
    {"kind": "suffix"},
    {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": LENGTH}},
)
BANDITS = {
    "EXP3Spec": {"rule": "exp3", "memory": "request"},
    "UCBSpec": {"rule": "ucb", "memory": "request"},
    "UCBSpec, continues to learn": {"rule": "ucb"},
    "UCBSpec by time": {"rule": "ucb", "reward": "time"},
}
TREES = ((4, 2, 2, 1), (4, 3, 1, 1), (2, 2, 2, 2), (8, 2, 1, 1), (4, 1, 1, 1), (2, 1, 1, 1))
RANKS = 8

Recordings = Mapping[str, Recording]


def policies(recordings: Recordings, times: Profile, heads: Mapping[str, str] = {}) -> pd.DataFrame:
    """SpecDec++'s Table 1 by replay: of each set and family of policies the fastest configuration,
    chosen on the prompts that are reported, as in the paper
    (:func:`best_of_families`). Each of `heads` is a family by its name, SpecDec++'s and improved
    MCSD's decision models; heads of another pair are left out."""
    tables = []
    for name, recording in recordings.items():
        own = {head: _headed(recording, place) for head, place in heads.items()}
        replay = Replay(recording)
        found = replay_trials(replay, [chain(recording, policy) for policy in POLICIES], times)
        tables.append(best_of_families(name, found))
        for head, headed in own.items():
            tried = [*found, *replay_trials(replay, headed, times)]
            table = best_of_families(name, tried)
            kinds = {"specdecpp", "decision"}
            tables.append(table[table["family"].isin(kinds)].assign(family=head))
    table = pd.concat(tables, ignore_index=True)
    by_speed = table.sort_values("speedup", ascending=False, kind="stable")
    return pd.concat([by_speed[by_speed["recording"] == name] for name in recordings])


def _headed(recording: Recording, head: str) -> list[Configuration]:
    """Drafting until a head expects a rejection, at several thresholds: none where the head is not
    of the recorded pair. A decision model judges one candidate, or all together."""
    prints = recording.header.fingerprints
    try:
        kind = load_head(head, prints[recording.draft_name()], prints["target"]).card.kind
    except UserError:
        return []
    family: list[dict[str, Any]] = (
        [{"kind": "specdecpp"}]
        if kind == "specdecpp"
        else [{"kind": "decision", "cumulative": cumulative} for cumulative in (False, True)]
    )
    return [
        chain(recording, {**policy, "head": head, "threshold": threshold})
        for policy in family
        for threshold in THRESHOLDS
    ]


def replay_trials(
    replay: Replay, configurations: Iterable[Configuration], profile: Profile
) -> list[Trial]:
    """A trial for each of `configurations` that can be replayed."""
    context = replay.recording.prompts.context
    return [
        Trial.of(configuration, replay.run(configuration).counts, profile, context, replayed=True)
        for configuration in configurations
        if replay.can(configuration)
    ]


@framed
def best_of_families(recording: str, trials: Sequence[Trial]) -> Rows:
    """One row a draft and family: its fastest configuration with `latency_ms`, `speedup`,
    `over_fixed` (the speedup over the best fixed K with the same draft, less 1), `of_oracle` (the
    share of the oracle's speedup with that draft), and :data:`RATES`. NaN where there is no fixed
    K or no oracle. Families are in the order of their fastest."""
    families: dict[tuple[str | None, str], list[Trial]] = {}
    for trial in by_estimate(trials):
        key = trial.configuration.draft, trial.configuration.family
        families.setdefault(key, []).append(trial)
    for (draft, family), tried in sorted(families.items(), key=lambda item: item[0][0] or ""):
        best = tried[0]
        yield {
            "recording": recording,
            "draft": draft or "",
            "family": family,
            "configuration": _label(best.configuration),
            "config_id": best.id,
            "tried": len(tried),
            "latency_ms": 1e3 * best.metrics[SECONDS] / max(best.counts["n"], 1),
            "speedup": best.metrics[METRIC],
            "over_fixed": _gain(best, families.get((draft, FIXED))) - 1,
            "of_oracle": _gain(best, families.get((draft, ORACLE))),
            **{name: best.metrics[name] for name in RATES},
        }


def _gain(trial: Trial, others: list[Trial] | None) -> float:
    return trial.metrics[METRIC] / others[0].metrics[METRIC] if others else float("nan")


def _label(configuration: Configuration) -> str:
    """The label without draft and sampling."""
    drafter = configuration.drafter
    if drafter is None:
        return configuration.family
    policies = drafter.policies
    return policies[0][1].label if policies else drafter.label


def regret(recordings: Recordings, times: Profile) -> pd.DataFrame:
    """BanditSpec's main table and theorems by replay: a row a set and entrant, `mat` and the regret
    in rounds, against the best arm (`regret_rounds`) and the best for each prompt
    (`each_rounds`). Beside `each_rounds` the order of the theorem's `bound` and the `lower` bound
    for truncated geometric lengths, for bandits that they cover: they start anew with
    each prompt and are rewarded in tokens."""
    tables = []
    for name, recording in recordings.items():
        header = recording.header
        arms = {"arms": _arms(recording), "sampling": header.sampling.model_dump()}
        asked = parse(ArmsPlan, {**arms, "bandits": list(BANDITS.values())}, "bandits")
        plan = asked.under(header.pair, header.sampling)
        comparison = replay_all(Replay(recording, hidden=False, profile=times), plan, times)
        table = comparison.table()
        table = table[table["kind"] != "baseline"]
        bandits = comparison.of("bandit")
        names = dict(zip([bandit.name for bandit in bandits], BANDITS, strict=True))
        bounds = orders(comparison)
        covered = {
            bandit.name: bounds[settings.rule]
            for bandit in bandits
            if (settings := settings_of(bandit.configuration)).memory == "request"
            and settings.reward == "tokens"
        }
        tables.append(
            table.assign(
                prompts=name,
                name=[names.get(n, n) for n in table["name"]],
                bound=[covered.get(n, np.nan) for n in table["name"]],
                lower=[bounds["lower"] if n in covered else np.nan for n in table["name"]],
                best_rounds=len(comparison.best().rounds),
            )
        )
    return pd.concat(tables, ignore_index=True)


def orders(comparison: ArmComparison) -> dict[str, float]:
    """The orders of Theorems 1 and 2, by rule, and the `lower` bound, in rounds: each bounds the
    regret of one prompt, and they add up over the prompts. The constants of the theorems are left
    out."""
    longest, total = comparison.longest, dict.fromkeys(("ucb", "exp3", "lower"), 0.0)
    arms = [arm.courses(timed=False) for arm in comparison.of("arm")]
    for courses in zip(*arms, strict=True):  # of a prompt
        means = [mean_tokens([course]) for course in courses]
        length, rounds = courses[0].reached[-1:], min(course.spent[-1:] for course in courses)
        total["ucb"] += ucb_bound(means, longest, length)[0]
        total["lower"] += tgd_lower_bound(means, length)[0]
        total["exp3"] += exp3_bound(len(courses), longest, rounds)[0]
    return total


@framed
def trees(recordings: Recordings, times: Profile) -> Rows:
    """Draft-initialised k-configurations (Improving MCSD, Table 2 and Fig. 4) by replay: `mat`,
    accepted path over depth (`path_rate`), modelled `speedup`, by set and shape."""
    for name, recording in recordings.items():
        replay, draft = Replay(recording, hidden=False), recording.draft_name()
        for branching in TREES:
            drafter = {"kind": "tree", "draft": draft, "branching": branching}
            rounds = replay.run(_configured(recording, drafter))
            yield {
                "prompts": name,
                "shape": "×".join(map(str, branching)),
                "nodes": int(rounds.drafted.max()),
                "mat": rounds.counts.metrics()["mat"],
                "path_rate": rounds.accepted.sum() / rounds.depth[rounds.depth > 0].sum(),
                "speedup": times.speedup(rounds.counts, draft, recording.prompts.context),
            }


@framed
def ranks(recordings: Recordings) -> Rows:
    """How often the target's token is the draft's first, second, … choice (`rank`, `share`), by
    set and draft."""
    for name, recording in recordings.items():
        for draft in recording.header.pair.drafts:
            shares = Replay(recording, hidden=False).track(draft).acceptance(RANKS)
            for rank, share in enumerate(shares, start=1):
                yield {"prompts": name, "draft": draft, "rank": rank, "share": share}


def chain(recording: Recording, policy: Mapping[str, Any]) -> Configuration:
    """A chain of the recorded draft with this policy and the recording's sampling."""
    drafter = {"kind": "draft_model", "draft": recording.draft_name(), "policy": policy}
    return _configured(recording, drafter)


def _arms(recording: Recording) -> list[dict[str, Any]]:
    """:data:`ARMS` with the recorded draft: the pair that is priced may have another one first."""
    draft = recording.draft_name()
    return [{**arm, "draft": draft} if arm["kind"] == "draft_model" else arm for arm in ARMS]


def _configured(recording: Recording, drafter: Mapping[str, Any]) -> Configuration:
    content = {"drafter": drafter, "sampling": recording.header.sampling.model_dump()}
    return parse(Configuration, content, "drafter")
