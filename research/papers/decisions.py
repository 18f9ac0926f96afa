"""Drafting as a Markov decision process: the cost of each decision to continue or to stop.

SpecDec++, §4.2. The state is the committed text and the round's k candidates. Both actions draw one
more candidate; "continue" drafts the next one, and "stop" has all k + 1 candidates verified. A
round of K candidates is therefore K - 1 continues and one stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import numpy as np
import pandas as pd

from specdec_core.tokens.statistics import Round

CONTINUE, STOP = "continue", "stop"


def immediate_costs(
    rounds: pd.DataFrame | Iterable[Round], t_draft: float, t_target: float
) -> pd.DataFrame:
    """SpecDec++, Thm 4.2: the cost of every decision of a recorded run.

    With c1 = t_draft and c2 = t_target - t_draft, drawing a candidate that is discarded costs c1,
    stopping costs c2, and drawing one that is kept costs nothing. The theorem says that the costs
    of a run sum to T_total of Eq. 3.1; by Lemma 3.1 they sum to T_total - T_0, where the oracle's
    time T_0 = t_draft · N is the same for every policy. Both are given: `cost` is the theorem's,
    and `seconds` adds t_draft for each token that the decision brought into the output.

    What the text leaves open:

    - A candidate is discarded if it is not in the output, even if it was accepted after the end of
      the request (an end token, a stop string).
    - A request that ends on an accepted candidate discards the target's token of that round: the
      round's stop costs c1 more.
    - A round without candidates (one token left, a policy or a drafter that proposes none) is a
      single stop that draws no candidate and costs c2.

    Args:
        rounds: the run's :class:`~specdec_core.tokens.statistics.Round` values or their columns
            `drafted`, `accepted`, `generated` and `draft_forwards`, in any order. Chains with one
            draft forward a candidate.
        t_draft: seconds of a draft forward.
        t_target: seconds of a target forward.

    Returns:
        One row a decision: `round` (row number in `rounds`), `candidate` (1, 2, …; 0 where none was
        drawn), `action`, `discarded` (tokens thrown away), `kept` (tokens brought into the output),
        `cost` and `seconds`.

    Raises:
        ValueError: a round's draft forwards are not its candidates.
    """
    if not isinstance(rounds, pd.DataFrame):
        rounds = pd.DataFrame([asdict(r) for r in rounds], columns=list(Round.__annotations__))
    drafted, accepted, generated, forwards = (
        rounds[name].to_numpy(dtype=int)
        for name in ("drafted", "accepted", "generated", "draft_forwards")
    )
    if (drafted != forwards).any():
        row = int(np.argmax(drafted != forwards))
        raise ValueError(
            f"round {row} drafted {drafted[row]} tokens in {forwards[row]} draft forwards; costs"
            " are of chains with one draft forward a token"
        )
    decisions = np.maximum(drafted, 1)
    index = np.repeat(np.arange(len(drafted)), decisions)
    first = np.repeat(np.cumsum(decisions) - decisions, decisions)
    step = np.arange(len(index)) - first + 1
    stops = step == decisions[index]
    candidate = np.minimum(step, drafted[index])
    kept = ((candidate > 0) & (candidate <= accepted[index])).astype(int)
    discarded = (candidate > accepted[index]).astype(int)
    bonus = (generated - accepted)[index]  # the target's token: 0 where the request ended before it
    kept[stops] += bonus[stops]
    discarded[stops] += 1 - bonus[stops]
    cost = t_draft * discarded + (t_target - t_draft) * stops
    return pd.DataFrame(
        {
            "round": index,
            "candidate": candidate,
            "action": np.where(stops, STOP, CONTINUE),
            "discarded": discarded,
            "kept": kept,
            "cost": cost,
            "seconds": cost + t_draft * kept,
        }
    )


def stopping_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """SpecDec++, Thm 4.3: stop once P(a candidate of the round is rejected) is at least
    (c2 + Δ) / (c1 + c2 + Δ).

    c1 = t_draft, c2 = t_target - t_draft; `delta` bounds how much more the rest of the text may
    cost after continuing (seconds, unknown; 0 is the threshold where a rejection makes no
    difference to what follows). 0, always stop, where a target forward is cheaper than a draft's.

    Raises:
        ValueError: c1 is not positive or Δ negative.
    """
    if not c1 > 0 or not delta >= 0:
        raise ValueError(f"need c1 > 0 and delta >= 0, got {c1} and {delta}")
    return max(c2 + delta, 0.0) / (c1 + max(c2 + delta, 0.0))
