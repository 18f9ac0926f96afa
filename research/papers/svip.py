"""SVIP's figures and tables that recordings hold: entropies, divergences and acceptance along
texts, and by replay the lengths that policies draft.

Recordings come by prompt set. Their first draft model is looked at, at every position of the
target's text; whether its candidate there is accepted follows from the text (greedy decoding), or
is drawn once (rejection sampling, :mod:`specdec_core.recordings.verified`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from research.frames import Rows, framed
from research.papers.bounds import (
    RatioFit,
    approximation_bound,
    bretagnolle_huber_bound,
    divergence,
    entropy_ratio,
    oracle_bound,
)
from research.papers.replayed import Recordings, chain
from specdec_core.cost import Profile
from specdec_core.models.loading import load_tokenizer
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.recordings.schema import Recording
from specdec_core.recordings.track import Track

PAPER_C = 0.18  # Fig. 4
CONSTANTS = (0.05, 0.18, 0.5, 1.0, 2.0)
EDGES = (64, 128, 256, 512, 1024)  # ends of ranges of context
BEFORE = 4  # tokens before a rejection, Fig. 3a
LEAST = 20  # times that a token is drafted, to be in Table 4
SHOWN = 4  # tokens of the least and of the greatest acceptance in Table 4
EXAMPLE_ROUNDS = 40  # Fig. 8
ORACLE = "Oracle"
POLICIES: dict[str, dict[str, Any]] = {
    **{f"Constant, K={k}": {"kind": "fixed", "max_tokens": k} for k in (2, 3, 4, 5)},
    "Heuristic": {"kind": "heuristic", "start": 5, "max_tokens": 40},
    "SVIP, h=0.3": {"kind": "svip", "threshold": 0.3, "max_tokens": 40},
    "SVIP, h=1.2": {"kind": "svip", "threshold": 1.2, "max_tokens": 40},
}
COMPARED = ("Constant, K=5", "Heuristic", "SVIP, h=0.3", "SVIP, h=1.2")  # Figs. 6 and 8


@framed
def oracle_lengths(greedy: Recordings, sampled: Recordings, long: Recordings) -> Rows:
    """Fig. 1: the oracle's draft lengths by context. A row a set, its sampling, and range of
    context that ends at `up_to` tokens: `rounds` of the oracle, `mean` and `variance` of the tokens
    that they accept, and the variance's 95 % interval over prompts (`variance_low`,
    `variance_high`). An output's last round, which its end cuts, is left out. The `long` texts
    of a set have separate rows."""
    for place, recording, track in _each(greedy, sampled, _apart(long)):
        prompt, start, length = _oracle_rounds(track)
        for edge, inside in _ranges(recording, prompt, track.position[start]):
            yield {
                **place,
                "up_to": edge,
                "rounds": int(inside.sum()),
                "mean": length[inside].mean(),
                "variance": length[inside].var(ddof=1),
                **_variance_interval(length[inside], prompt[inside]),
            }


@framed
def entropies(*recordings: Recordings) -> Rows:
    """Table 1: a row a set and sampling with the draft's mean entropy at `accepted` and at
    `rejected` candidates (nats), and how many there are of each."""
    for place, _, track in _each(*recordings):
        accepted, entropy = track.trace.agrees, track.trace.entropy[track.trace.trajectory]
        means = {"accepted": entropy[accepted].mean(), "rejected": entropy[~accepted].mean()}
        counts = {"n_accepted": int(accepted.sum()), "n_rejected": int((~accepted).sum())}
        yield {**place, **means, **counts}


@framed
def divergence_before_rejections(*recordings: Recordings) -> Rows:
    """Fig. 3a: mean KL(q‖p), nats, at rejected candidates (`offset` 0) and at the four accepted
    ones before them (-4 … -1). Rejections behind fewer accepted candidates are left out."""
    for place, _, track in _each(*recordings):
        trace = track.trace
        at = trace.trajectory
        kl = divergence(trace.entropy[at], trace.cross_entropy[at])
        # Accepted candidates in a row before each position, within its text.
        before = np.zeros(len(at), int)
        for s in range(1, len(at)):
            same = track.prompt[s] == track.prompt[s - 1]
            before[s] = before[s - 1] + 1 if same and trace.agrees[s - 1] else 0
        rejected = np.flatnonzero(~trace.agrees & (before >= BEFORE))
        for offset in range(-BEFORE, 1):
            mean = kl[rejected + offset].mean() if len(rejected) else np.nan
            yield {**place, "offset": offset, "kl": mean, "rejections": len(rejected)}


@framed
def sorted_probabilities(*recordings: Recordings) -> Rows:
    """Fig. 3b: the mean log probability of the draft's `rank`-th most likely token, at accepted
    and at rejected candidates (`outcome`). Recordings hold the ten most likely."""
    for place, _, track in _each(*recordings):
        trace = track.trace
        log_q = np.log(np.maximum(trace.top_probs[trace.trajectory], 1e-12))
        for outcome, chosen in (("accepted", trace.agrees), ("rejected", ~trace.agrees)):
            for rank, value in enumerate(log_q[chosen].mean(axis=0), start=1):
                yield {**place, "outcome": outcome, "rank": rank, "log_probability": value}


@framed
def bounds(*recordings: Recordings, bins: int = 40) -> Rows:
    """Fig. 4: the acceptance probability β of positions, sorted by it and in `bins` equal parts,
    with the mean of Pinsker's bound (Eq. 4), of Bretagnolle–Huber's (Eq. 12) and of 1 - sqrt(c H),
    c = 0.18 (Eq. 6), all at least 0. `holds` is the part's share of positions with 1 - sqrt(c H)
    below β."""
    for place, _, track in _each(*recordings):
        trace, at = track.trace, track.trace.trajectory
        beta, entropy = trace.overlap[at].astype(float), trace.entropy[at]
        oracle = np.maximum(oracle_bound(entropy, trace.cross_entropy[at]), 0)
        huber = bretagnolle_huber_bound(entropy, trace.cross_entropy[at])
        alone = np.maximum(approximation_bound(entropy, PAPER_C), 0)
        parts = np.array_split(np.argsort(beta, kind="stable"), bins)
        for number, part in enumerate(parts):
            yield {
                **place,
                "share": (number + 0.5) / bins,
                "beta": beta[part].mean(),
                "oracle_bound": oracle[part].mean(),
                "huber_bound": huber[part].mean(),
                "approximation": alone[part].mean(),
                "holds": np.mean(alone[part] <= beta[part] + 1e-6),
            }


@framed
def ratio_fits(*recordings: Recordings) -> Rows:
    """Eqs. 9 and 14: how often γ ≤ 2c + 1, so that the approximation is a bound, by `c`: as
    `measured`, by the Gaussian and by the shifted Gamma fitted to γ, with their parameters."""
    for place, _, track in _each(*recordings):
        trace, at = track.trace, track.trace.trajectory
        entropy, cross = trace.entropy[at], trace.cross_entropy[at]
        ratio = entropy_ratio(entropy, cross)
        ratio = ratio[np.isfinite(ratio)]
        fits = {
            "gaussian": RatioFit.gaussian(entropy, cross),
            "gamma": RatioFit.gamma(entropy, cross),
        }
        names = ("mean", "deviation", "shape", "rate")
        parameters = [value for fit in fits.values() for value in fit.parameters]
        for c in CONSTANTS:
            shares = {name: float(fit.reliability(c)) for name, fit in fits.items()}
            row = {**place, "c": c, "measured": np.mean(ratio <= 2 * c + 1), **shares}
            yield row | dict(zip(names, parameters, strict=True))


@framed
def lengths(*recordings: Recordings) -> Rows:
    """Figs. 6 and 7: what policies draft, by replay. A row a set, sampling and policy: tokens
    `drafted` a round, share `accepted` and `mat` of the rounds in which the policy was free to
    draft 40; and of those that begin where an oracle's round begins (Fig. 1) the mean of drafted
    minus the oracle's tokens (`delta`), its size (`distance`) and how often it is 0 (`exact`).
    Every policy has a round at each of the oracle's. One that stops early has further rounds
    before the oracle's next; with them a long stretch of agreement would count many times."""
    for place, recording, track in _each(*recordings):
        for policy, rounds in _replayed(recording, POLICIES):
            free, delta = _deltas(track, rounds)
            if not len(delta):
                continue
            yield {
                **place,
                "policy": policy,
                "drafted": rounds.drafted[free].mean(),
                "accepted": rounds.accepted[free].sum() / max(rounds.drafted[free].sum(), 1),
                "mat": rounds.generated[free].mean(),
                "delta": delta.mean(),
                "distance": np.abs(delta).mean(),
                "exact": np.mean(delta == 0),
            }


@framed
def speedups(sampled: Recordings, long: Recordings, times: Profile) -> Rows:
    """Table 3 and Fig. 7a: by set and policy the modelled `speedup` at this machine's forward
    times, and the `tokens` of a text in the mean. The `long` texts of a set have separate rows.
    Policies' own time is left out."""
    for name, recording in {**sampled, **_apart(long)}.items():
        draft, context = recording.draft_name(), recording.prompts.context
        tokens = np.mean([len(output) for output in recording.prompts.outputs])
        for policy, rounds in _replayed(recording, POLICIES):
            speedup = times.speedup(rounds.counts, draft, context)
            yield {"prompts": name, "tokens": tokens, "policy": policy, "speedup": speedup}


@framed
def lengths_by_context(*recordings: Recordings) -> Rows:
    """Fig. 6: tokens `drafted` a round and the share `accepted`, by policy and range of context
    that ends at `up_to`."""
    for place, recording, track in _each(*recordings):
        for policy, rounds in _replayed(recording, COMPARED):
            free, _ = _deltas(track, rounds)
            for edge, inside in _ranges(recording, rounds.prompt, rounds.position, free):
                drafted, accepted = rounds.drafted[inside], rounds.accepted[inside]
                yield {
                    **place,
                    "policy": policy,
                    "up_to": edge,
                    "rounds": int(inside.sum()),
                    "drafted": drafted.mean(),
                    "accepted": accepted.sum() / max(drafted.sum(), 1),
                }


@framed
def example(recordings: Recordings) -> Rows:
    """Fig. 8: the tokens `drafted` in the first rounds of the first set's first text, by policy,
    and beside them the oracle's own rounds."""
    place, recording, track = next(_each(recordings))
    by_policy = {
        policy: rounds.drafted[(rounds.prompt == 0) & (rounds.position > 0)]
        for policy, rounds in _replayed(recording, COMPARED)
    }
    prompt, _, length = _oracle_rounds(track)
    for policy, drafted in {**by_policy, ORACLE: length[prompt == 0]}.items():
        for number, tokens in enumerate(drafted[:EXAMPLE_ROUNDS], start=1):
            where = {"prompts": place["prompts"], "policy": policy, "round": number}
            yield {**where, "drafted": int(tokens)}


def tokens(*recordings: Recordings) -> pd.DataFrame:
    """Table 4: drafted tokens with the draft's mean `entropy` and the share `accepted`, over all
    sets together: all of them, and of the tokens drafted at least 20 times the four least and
    the four most often accepted."""
    frame = pd.concat(
        pd.DataFrame(
            {
                "token": track.trace.draft_token[track.trace.trajectory],
                "entropy": track.trace.entropy[track.trace.trajectory],
                "accepted": track.trace.agrees,
            }
        )
        for _, _, track in _each(*recordings)
    )
    columns = {"entropy": ("entropy", "mean"), "accepted": ("accepted", "mean")}
    columns["count"] = ("accepted", "size")
    whole = frame.assign(token=0).groupby("token").agg(**columns)
    means = frame.groupby("token").agg(**columns)
    means = means[means["count"] >= LEAST].sort_values(["accepted", "count"])
    ends = pd.concat([means.head(SHOWN), means.tail(SHOWN)]) if len(means) > 2 * SHOWN else means
    tokenizer = load_tokenizer(next(iter(recordings[0].values())).header.pair.target)
    names = [repr(tokenizer.decode([token])) for token in ends.index]
    shown = pd.concat([whole, ends], ignore_index=True)
    return shown.assign(token=["all tokens", *names])


def _each(*recordings: Recordings) -> Iterator[tuple[dict[str, Any], Recording, Track]]:
    """The recordings with their `prompts` and `sampling` by name, and the tracks of their first
    drafts."""
    for sets in recordings:
        for name, recording in sets.items():
            sampling = recording.header.sampling
            label = "greedy" if sampling.greedy else f"T={sampling.temperature:g}"
            place = {"prompts": name, "sampling": label}
            yield place, recording, Replay(recording, hidden=False, drawn=True).track()


def _apart(long: Recordings) -> dict[str, Recording]:
    """The recordings of long texts, under names of their own."""
    return {f"{name}, long": recording for name, recording in long.items()}


def _ranges(
    recording: Recording, prompt: np.ndarray, position: np.ndarray, among: np.ndarray | bool = True
) -> Iterator[tuple[int, np.ndarray]]:
    """The end of each range of context, and which of the places `among` some are in it; without the
    ranges of fewer than 20. A place is a position in the output of a prompt."""
    prompt_tokens = np.array([len(tokens) for tokens in recording.prompts.tokens])
    which = np.searchsorted(EDGES, prompt_tokens[prompt] + position)
    for number, edge in enumerate(EDGES):
        inside = (which == number) & among
        if inside.sum() >= LEAST:
            yield edge, inside


def _oracle_rounds(track: Track) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rounds of a policy that always drafts what will be accepted: prompt, start and accepted
    candidates of each. The first begins behind the target's first token; the last is left out."""
    rounds = []
    ends = np.append(track.firsts[1:], len(track.position))
    for prompt, (first, end) in enumerate(zip(track.firsts, ends, strict=True)):
        start = first + 1
        while start < end and (length := track.agreeing[start]) < end - start:
            rounds.append((prompt, start, length))
            start += length + 1
    columns = np.array(rounds, dtype=np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def _variance_interval(
    values: np.ndarray, groups: np.ndarray, draws: int = 500
) -> dict[str, float]:
    """The variance's 95 % interval as columns: a bootstrap over groups, from sums by group."""
    index = np.unique(groups, return_inverse=True)[1]
    n, total, squares = (np.bincount(index, values.astype(float) ** power) for power in (0, 1, 2))
    picked = np.random.default_rng(0).integers(len(n), size=(draws, len(n)))
    n, total, squares = (sums[picked].sum(axis=1) for sums in (n, total, squares))
    variance = (squares - total**2 / n) / np.maximum(n - 1, 1)
    low, high = np.percentile(variance, [2.5, 97.5])
    return {"variance_low": float(low), "variance_high": float(high)}


def _replayed(
    recording: Recording, policies: Iterable[str]
) -> Iterator[tuple[str, ReplayedRounds]]:
    """The rounds of chains of the first draft, by the names of their `policies`."""
    replay = Replay(recording, hidden=False, drawn=True)
    for name in policies:
        yield name, replay.run(chain(recording, POLICIES[name]))


def _deltas(track: Track, rounds: ReplayedRounds) -> tuple[np.ndarray, np.ndarray]:
    """Which rounds could have drafted as many tokens as a recording holds, and for those that begin
    where an oracle's round begins the drafted tokens minus the oracle's."""
    start = track.firsts[rounds.prompt] + rounds.position
    free = (rounds.position > 0) & (track.room[start] >= track.header.max_draft)
    _, starts, lengths = _oracle_rounds(track)
    oracle = np.full(len(track.position), -1)
    oracle[starts] = lengths
    compared = free & (oracle[start] >= 0)
    return free, (rounds.drafted - oracle[start])[compared]
