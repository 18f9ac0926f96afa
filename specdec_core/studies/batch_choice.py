"""The best number of candidates for each batch size, by a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.search.batch_plan import (
    LENGTHS,
    agreement,
    batch_policy,
    best_lengths,
    chain_counts,
    predict,
)

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class BatchChoice:
    """Throughput of every K by a profile: `predicted` as returned by
    :func:`specdec_core.search.batch_plan.predict`, the `best` K by the number of requests, and the
    configuration that follows these; None where nothing should be drafted."""

    draft: str
    predicted: pd.DataFrame
    best: dict[int, int]
    configuration: Configuration | None

    def chains(
        self, slots: Sequence[int], lengths: Sequence[int] | None = None
    ) -> list[Configuration]:
        """Chains of the K in `lengths`, or of those that are best at some of `slots`."""
        return [
            Configuration(
                drafter=DraftModelSettings(draft=self.draft, policy=FixedSettings(max_tokens=k))
            )
            for k in lengths or sorted({self.best[count] for count in slots} - {0})
        ]


def choose_by_batch(
    pair: Pair,
    profile: Profile,
    prompts: Sequence[Tokens],
    slots: Sequence[int],
    new_tokens: int,
    observer: Observer | None = None,
) -> BatchChoice:
    """The best K at every number of requests up to the largest of `slots`, with the draft that is
    best on average, from the drafts' agreement with the target's greedy text. `predicted` has the
    numbers in `slots` only. Raises :class:`UserError` for a pair without a draft model."""
    if not pair.draft_models:
        raise UserError("the pair has no draft model: give one with --draft")
    observer = observer or Observer()
    observer.stage("reading the target's own text", len(prompts))
    requests = [Request(str(n), tokens, new_tokens) for n, tokens in enumerate(prompts)]
    generations = Engine(pair, slots=max(slots)).generate(requests, lambda _: observer.step())
    outputs = [generation.tokens for generation in generations]
    context = sum(map(len, prompts)) / len(prompts) + new_tokens / 2
    tables = {}
    for name, model in pair.draft_models.items():
        agreeing = agreement(model, prompts, outputs)
        counts = {k: chain_counts(agreeing, k) for k in LENGTHS if k < new_tokens}
        tables[name] = predict(profile, counts, range(1, max(slots) + 1), name, context)
    speedups = {n: table.groupby("batch")["speedup"].max().mean() for n, table in tables.items()}
    draft = max(speedups, key=speedups.__getitem__)
    table = tables[draft]
    best = best_lengths(table)
    policy = batch_policy(best)
    drafter = DraftModelSettings(draft=draft, policy=policy) if policy is not None else None
    return BatchChoice(
        draft,
        table[table["batch"].isin(slots)].reset_index(drop=True),
        best,
        Configuration(drafter=drafter) if drafter is not None else None,
    )
