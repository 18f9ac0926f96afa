"""BanditSpec's second setting: requests of several kinds at once, and draft lengths as arms."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import pandas as pd

from research.bandits.comparison import ArmsPlan, mixed, race
from specdec_core.config import PairSpec, parse
from specdec_core.models.pair import eagle_heads_of, load_pair
from specdec_core.recordings.schema import Recording

SLOTS = 4  # requests at once
MOST = 16  # requests
LENGTHS = (1, 2, 3, 4)  # γ
BANDITS = {"EXP3Spec": "exp3", "UCBSpec": "ucb"}


def together(greedy: Mapping[str, Recording], spec: PairSpec) -> pd.DataFrame:
    """Live, `SLOTS` requests at once, prompts of the recorded sets in turn: a row an entrant
    (:meth:`research.bandits.comparison.ArmComparison.table`), with the `draft`: the pair's first
    EAGLE head or, for a pair without one, its first draft model."""
    draft = next(iter((*eagle_heads_of(spec), *spec.drafts)))
    sets = [recording.prompts.tokens for recording in greedy.values()]
    prompts = [tuple(tokens.tolist()) for tokens in islice(mixed(sets), MOST)]
    chain = {"kind": "draft_model", "draft": draft}
    arms = [{**chain, "policy": {"kind": "fixed", "max_tokens": k}} for k in LENGTHS]
    bandits = [{"rule": rule, "memory": "request"} for rule in BANDITS.values()]
    plan = parse(ArmsPlan, {"pair": spec, "arms": arms, "bandits": bandits}, "bandits")
    longest = next(iter(greedy.values())).header.max_new_tokens
    found = race(load_pair(spec), plan, prompts, longest, slots=SLOTS)
    names = ["autoregressive", *(f"γ = {k}" for k in LENGTHS), *BANDITS]
    return found.table().assign(name=names, draft=draft)
