"""Seconds of an engine step over many requests.

A step feeds the target one sequence in which rows of any length are packed: decoding rows with
their candidates, and chunks of prompts. Before that, drafts propose in forwards that all drafting
rows share. A row costs what its own tokens and its own context cost, so the time of a forward is a
function of sums over its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.config import Value
from specdec_core.cost.forward import ForwardCost, ForwardTerms, Measurement, Work
from specdec_core.cost.profile import Profile

_PROMPTS = (64, 256, 512)  # tokens of the prefills that enter a fit


class StepTimes(Value):
    """The times of a pair's steps on one machine: the target's forward, in steps with candidates
    and without (`autoregressive`; unset, the same), forwards of the drafts, and what the engine
    adds to a step and to each decoding row. `proposals` are seconds of a step in which something
    proposes, by :func:`~specdec_core.cost.proposer_keys`. `mixes` says whether a forward has
    prompts and candidates together."""

    target: ForwardTerms
    autoregressive: ForwardTerms | None = None
    drafts: dict[str, ForwardTerms] = Field(default={})
    per_step: float = 0.0
    per_row: float = 0.0
    proposals: dict[str, float] = Field(default={})
    mixes: bool = True

    @classmethod
    def of(cls, profile: Profile) -> StepTimes:
        """From a profile, or from one :meth:`Profile.under` a configuration. Steps without
        candidates have forwards of one token a row, which may run other kernels."""
        cost, alone = profile.target, profile.autoregressive_forward
        single = [m for m in cost.measurements if m.width == 1]
        several = [m for m in cost.measurements if m.width > 1]
        drafts = {name: _fit(own, own.measurements) for name, own in profile.drafts.items()}
        return cls(
            target=_fit(cost, several or single),
            autoregressive=_fit(cost, single or several)
            if alone is None
            else ForwardTerms(fixed=alone),
            drafts={
                name: terms.model_copy(
                    update={"fixed": terms.fixed + profile.draft_overhead.get(name, 0.0)}
                )
                for name, terms in drafts.items()
            },
            per_step=max(profile.round_overhead - profile.row_overhead, 0.0),
            per_row=profile.row_overhead,
            proposals=profile.proposals,
            mixes=profile.mixes,
        )

    def draft(self, name: str) -> ForwardTerms:
        """A draft's forward. Raises :class:`UserError` for a draft without times."""
        if name not in self.drafts:
            there = ", ".join(self.drafts) or "none"
            raise UserError(f"no forward time of draft {name} (there are: {there})")
        return self.drafts[name]


def _fit(cost: ForwardCost, measured: Sequence[Measurement]) -> ForwardTerms:
    """A fit to measured forwards, and to prompts that are prefilled. A prompt takes at least as
    long as a token: what a server's draft takes for one is a difference of whole steps, and as
    little as nothing, which as a relative error would outweigh all forwards."""
    prompts = _PROMPTS if cost.prefill is not None else ()
    seconds = [max(cost.prefill_seconds(n), cost.seconds(1, n)) for n in prompts]
    return _fitted(tuple(measured), tuple(zip(prompts, seconds, strict=True)))


@lru_cache
def _fitted(
    measured: tuple[Measurement, ...], prompts: tuple[tuple[int, float], ...]
) -> ForwardTerms:
    """The fit is kept, because a profile is asked about many configurations."""
    works = [Work.of([(m.width, m.context)] * m.batch) for m in measured]
    works += [Work.of([(tokens, 0)]) for tokens, _ in prompts]
    seconds = [*(m.seconds for m in measured), *(taken for _, taken in prompts)]
    return ForwardTerms.fit(works, seconds)
