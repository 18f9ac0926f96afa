"""Costs and counts that the tests know the truth of."""

import itertools
from typing import Any

from specdec_core.cost import ForwardCost, ForwardKind, ForwardTerms, Measurement, Profile, Work
from specdec_core.tokens.statistics import Counts

TOKEN = ForwardTerms(fixed=3e-3, per_cached=2e-6)
ROWS = ForwardTerms(fixed=4e-3, per_token=3e-4, per_cached=4e-6)
WIDE = ForwardTerms(fixed=2.5e-3, per_token=2e-4, per_cached=1e-6, per_pair=5e-8)
TRUTH = {ForwardKind.TOKEN: TOKEN, ForwardKind.ROWS: ROWS, ForwardKind.WIDE: WIDE}


def truth(width: float, context: float, batch: int = 1) -> float:
    """Seconds of a forward."""
    return TRUTH[ForwardKind.of(width, batch)].seconds(Work.uniform(width, context, batch))


def measure(widths: tuple[int, ...], contexts: tuple[int, ...], batches: tuple[int, ...]):
    return [
        Measurement(width=w, context=c, batch=b, seconds=truth(w, c, b))
        for w, c, b in itertools.product(widths, contexts, batches)
    ]


def counts(n_draft: int, n_target: int, n_discarded: int, requests: int = 1) -> Counts:
    """Counts of chains with no skipped draft pass."""
    accepted = n_draft - n_discarded
    return Counts(
        requests=requests,
        n=accepted + n_target,
        n_draft=n_draft,
        n_target=n_target,
        n_discarded=n_discarded,
        n_drafted=n_draft,
        n_accepted=accepted,
        n_target_tokens=n_target,
    )


def constant_profile(target: float, draft: float, name: str = "draft", **more: Any) -> Profile:
    """A profile whose forwards of any size take these seconds."""
    facts = {"device": "cpu", "target_dtype": "float32", "draft_dtype": "float32", **more}
    drafts = {name: ForwardCost.constant(draft)}
    return Profile(target=ForwardCost.constant(target), drafts=drafts, **facts)
