"""What existing studies compute from recordings, as tables of the papers: policies against the
oracle, bandits against their best arm, trees by shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from research.bandits.comparison import ArmComparison, ArmsPlan, replay_all, settings_of
from research.bandits.regret import exp3_bound, mean_tokens, tgd_lower_bound, ucb_bound
from research.frames import Rows, framed
from research.papers.families import best_of_families, replay_trials
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, parse
from specdec_core.cost import Profile
from specdec_core.drafting.heads.storage import load_head
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
POLICIES: tuple[dict[str, Any], ...] = (
    *({"kind": "fixed", "max_tokens": k} for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14)),
    *({"kind": "confidence_product", "threshold": h} for h in THRESHOLDS),
    *({"kind": "svip", "threshold": h, "max_tokens": 20} for h in (0.3, 0.6, 0.9, 1.2, 1.5)),
    {"kind": "oracle"},
)
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
