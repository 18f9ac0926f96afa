"""What a fixed draft length wastes, from a recording (Post-use & Pre-cut, §4.1 and Fig. 2): how the
best length varies from round to round, and how much of what was drafted before is drafted again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import ReplayedRounds

LENGTH = 12  # λ of the paper's plain drafting (D.4.2)
LONGEST = 5  # β, tokens of a phrase
DRAFT_CALL, TARGET_CALL = "draft call", "target call"
DRAFTED, REJECTED = "drafted", "rejected"


@dataclass(frozen=True)
class BestLengths:
    """The best draft lengths of one draft model on one recording.

    `fixed` is λ*_global, the best of all fixed lengths by Eq. 3; `lengths` has one row a fixed
    length: `length`, `mat`, `utilisation`, `speedup`. `rounds` has one row a round of plain
    drafting with `fixed`: `request`, `round` (1, 2, … in the request) and `length`, its λ*_local:
    the candidates that the target would accept, however many there are. Rounds in which the output
    ended before the draft erred are left out.
    """

    fixed: int
    lengths: pd.DataFrame
    rounds: pd.DataFrame


def best_lengths(replay: Replay, target_cost: float, draft: str | None = None) -> BestLengths:
    """λ*_global and, round by round, λ*_local (Fig. 2a); a target call costs `target_cost` draft
    calls. Raises :class:`UserError` where the recording has no such draft."""
    name = replay.recording.draft_name(draft)
    rows = []
    for length in range(1, replay.header.max_draft + 1):
        metrics = _plain(replay, name, length).counts.metrics()
        mat, utilisation = metrics["mat"], metrics["utilisation"] or np.inf
        speedup = post_use_speedup(mat, utilisation, target_cost)
        rows.append({"length": length, "mat": mat, "utilisation": utilisation, "speedup": speedup})
    lengths = pd.DataFrame(rows)
    fixed = int(lengths["length"][lengths["speedup"].argmax()])
    track, rounds = replay.track(name), _plain(replay, name, fixed)
    starts = track.firsts[rounds.prompt] + rounds.position
    numbers = rounds.frame()["round"].to_numpy()
    erred = (rounds.position > 0) & (track.agreeing[starts] < track.left[starts])
    local = pd.DataFrame({
        "request": np.asarray(rounds.ids, dtype=object)[rounds.prompt],
        "round": numbers,
        "length": track.agreeing[starts],
    })  # fmt: skip
    return BestLengths(fixed, lengths, local[erred].reset_index(drop=True))


# A round of plain drafting: the text's last token with the chain after it, how many tokens of the
# chain were accepted, and the output from the last token of the round on.
_Round = tuple[list[int], int, list[int]]


def recycled(
    replay: Replay, draft: str | None = None, length: int = LENGTH, longest: int = LONGEST
) -> pd.DataFrame:
    """How often phrases of earlier rounds come again in plain drafting with λ = `length` (Fig. 2b).

    A phrase is a run of `tokens` drafted tokens, known by the token before it, as the cache has
    them (§5.1). After a draft call it comes again where the draft model's next tokens are a phrase
    of an earlier round; after a target call, where the output continues with one. One row a
    `call` (:data:`DRAFT_CALL`, :data:`TARGET_CALL`), a number of `tokens` (1 … `longest`), and what
    phrases are `of`: all that was drafted, or only what was rejected. `calls` counts those with so
    many tokens to come, `share` is the part of them after which one came again.
    """
    name = replay.recording.draft_name(draft)
    hits: dict[tuple[str, int, str], list[bool]] = defaultdict(list)
    for request in _requests(replay, name, length):
        pools: dict[str, set[tuple[int, ...]]] = {DRAFTED: set(), REJECTED: set()}
        for text, accepted, rest in request:
            phrases = {
                (begin, size): tuple(text[begin : begin + size + 1])
                for begin in range(len(text) - 1)
                for size in range(1, min(longest, len(text) - 1 - begin) + 1)
            }
            for (_, size), phrase in phrases.items():
                for of, pool in pools.items():
                    hits[DRAFT_CALL, size, of].append(phrase in pool)
            for (begin, _), phrase in phrases.items():
                pools[DRAFTED].add(phrase)
                if begin >= accepted:
                    pools[REJECTED].add(phrase)
            for size in range(1, min(longest, len(rest) - 1) + 1):
                for of, pool in pools.items():
                    hits[TARGET_CALL, size, of].append(tuple(rest[: size + 1]) in pool)
    return pd.DataFrame(
        {"call": call, "tokens": size, "of": of, "calls": len(found), "share": np.mean(found)}
        for (call, size, of), found in sorted(hits.items())
    )


def _plain(replay: Replay, draft: str, length: int) -> ReplayedRounds:
    """Plain drafting with λ = `length`."""
    drafter = DraftModelSettings(draft=draft, policy=FixedSettings(max_tokens=length))
    return replay.run(Configuration(drafter=drafter, sampling=replay.header.sampling))


def _requests(replay: Replay, draft: str, length: int) -> list[list[_Round]]:
    """The rounds with candidates, request by request."""
    track, rounds = replay.track(draft), _plain(replay, draft, length)
    columns = (rounds.prompt, rounds.position, rounds.drafted, rounds.accepted, rounds.generated)
    found: list[list[_Round]] = [[] for _ in rounds.ids]
    for prompt, position, drafted, accepted, generated in np.stack(columns, axis=1).tolist():
        if not drafted:
            continue
        output = replay.recording.prompts.outputs[prompt].tolist()
        chain = track.chain(int(track.firsts[prompt]) + position)[:drafted]
        rest = output[position + generated - 1 :]
        found[prompt].append(([output[position - 1], *chain], accepted, rest))
    return found


def post_use_speedup(mat: float, utilisation: float, target_cost: float) -> float:
    """Post-use / Pre-cut, Eq. 3: 1/S = 1/MAT + t_draft / (Util · t_target). `mat` is N/N_target,
    `utilisation` N/N_draft and `target_cost` t_target / t_draft."""
    return 1 / (1 / mat + 1 / (utilisation * target_cost))
