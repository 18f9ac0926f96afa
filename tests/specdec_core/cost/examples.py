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


def cost_of(seconds: float) -> ForwardCost:
    """The cost of a forward that takes these seconds, and 10 µs a token."""
    shapes = itertools.product((1, 2, 4), (1, 2))
    return ForwardCost.fit(
        [Measurement(width=w, context=16, batch=b, seconds=seconds + w * 1e-5) for w, b in shapes]
    )


def profile_of(target: ForwardCost, drafts: dict[str, ForwardCost], **more: Any) -> Profile:
    """A profile with these costs, of float32 on a CPU."""
    facts = {"device": "cpu", "target_dtype": "float32", "draft_dtype": "float32", **more}
    return Profile(target=target, drafts=drafts, **facts)


def fitted_profile(**more: Any) -> Profile:
    """A profile with target forwards of 10 ms, draft forwards of 1 ms, and 10 µs a token."""
    return profile_of(cost_of(0.01), {"draft": cost_of(0.001)}, **more)


def constant_profile(target: float, draft: float, name: str = "draft", **more: Any) -> Profile:
    """A profile whose forwards of any size take these seconds."""
    return profile_of(ForwardCost.constant(target), {name: ForwardCost.constant(draft)}, **more)
