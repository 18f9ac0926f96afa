"""BanditSpec's second setting: requests of several kinds at once, and draft lengths as arms."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice, zip_longest

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.config import parse
from specdec_core.models.pair import eagle_heads_of, load_pair
from specdec_core.recordings.schema import Recording
from specdec_core.studies.bandits import ArmsPlan, race
from specdec_core.studies.papers.studies import Decoded

SLOTS = 4  # requests at once
TURNS = 4  # of so many
LENGTHS = (1, 2, 3, 4)  # γ
BANDITS = {"EXP3Spec": "exp3", "UCBSpec": "ucb"}


def together(greedy: Mapping[str, Recording], tables: Decoded) -> pd.DataFrame:
    """Live, `SLOTS` requests at once, prompts of all recorded sets in turn: a row an entrant
    (:meth:`specdec_core.studies.bandits.ArmComparison.table`), with the name of the `draft` and the
    `requests`. The draft is the tables' first EAGLE head; for a pair without one its first draft
    model. Raises :class:`UserError` where there are too few prompts."""
    spec = tables.result.pair
    draft = next(iter((*eagle_heads_of(spec), *spec.drafts)))
    sets = [recording.prompts.tokens for recording in greedy.values()]
    mixed = (tokens for of_all in zip_longest(*sets) for tokens in of_all if tokens is not None)
    prompts = [tuple(tokens.tolist()) for tokens in islice(mixed, SLOTS * TURNS)]
    if len(prompts) < SLOTS:
        raise UserError(f"{len(prompts)} prompts, of which {SLOTS} are to be decoded at once")
    kind, each = "draft_model", {"draft": draft}
    arms = [{"kind": kind, **each, "policy": {"kind": "fixed", "max_tokens": k}} for k in LENGTHS]
    bandits = [{"rule": rule, "memory": "request"} for rule in BANDITS.values()]
    plan = parse(ArmsPlan, {"pair": spec, "arms": arms, "bandits": bandits}, "bandits")
    longest = next(iter(greedy.values())).header.max_new_tokens
    comparison = race(load_pair(spec), plan, prompts, longest, slots=SLOTS)
    names = [*(f"γ = {k}" for k in LENGTHS), *BANDITS]
    table = comparison.table()
    return table.assign(name=[table["name"][0], *names], draft=draft, requests=len(prompts))
