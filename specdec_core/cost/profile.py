"""A pair's forward costs on one machine, and the cost of counts of forward passes.

N_draft, N_target and N_discarded measure a configuration's work and do not depend on the hardware;
a :class:`Profile` gives the cost of that work on one machine. Together they predict the time of any
configuration (SpecDec++, Eq. 3.1, 3.2 and 5.1) without running it. All times are seconds.

A profile is measured, or written by hand with a number for each model:

```yaml
device: two A100                 # shown in reports
target: 0.112                    # a forward of the target, whatever it is fed
autoregressive_forward: 0.108    # a forward of the target when decoding without a draft
drafts:
  small: 0.0234                  # a forward of the draft; "*" stands for every other draft
```
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import CANDIDATES, Configuration, PolicySettings, Value, load_yaml, parse
from specdec_core.cost.forward import ForwardCost
from specdec_core.tokens.statistics import Counts

EVERY = "*"  # in place of a draft's name: every draft that is not named


class Profile(Value):
    """What forwards of a pair cost on one machine, in seconds. The cost of a forward is one number,
    or what was fitted to measured forwards."""

    target: ForwardCost = Field(description="a forward of the target")
    drafts: dict[str, ForwardCost] = Field(
        description=f'a forward by draft; "{EVERY}" is every other draft'
    )
    device: str = Field(description="shown in reports")
    target_dtype: str = "unknown"
    draft_dtype: str = "unknown"
    threads: int = 1
    round_overhead: float = Field(default=0.0, description="what the engine adds to a round")
    draft_overhead: dict[str, float] = Field(
        default={}, description="what the engine adds to a drafting step, by draft"
    )
    row_overhead: float = Field(
        default=0.0, description="what each further request that decodes adds to a step"
    )
    mixes: bool = Field(
        default=True, description="whether a forward of the target has prompts and candidates"
    )
    autoregressive_forward: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="a forward of the target without drafting; unset, one of one token",
    )
    policies: dict[str, float] = Field(
        default={}, description="what a length policy adds to a candidate, by draft and policy"
    )
    proposals: dict[str, float] = Field(
        default={},
        description="what proposing adds to a round, apart from drafting steps, by drafter",
    )
    proposing: float = Field(default=0.0, description="their sum under a configuration")
    whole_chains: bool = Field(
        default=False,
        description="whether chains are drafted in full where the sequence ends sooner, as in vLLM",
    )

    def of(self, drafts: Iterable[str]) -> Profile:
        """The profile of a pair with `drafts`: without other drafts, and in this order."""
        costs = {draft: self.drafts.get(draft, self.drafts.get(EVERY)) for draft in drafts}
        known = {draft: cost for draft, cost in costs.items() if cost is not None}
        return self.model_copy(update={"drafts": known})

    def check(self, drafts: Iterable[str], source: str) -> None:
        """Raises :class:`UserError`, naming `source`, for a draft without a forward time."""
        for draft in drafts:
            if not self.drafts.keys() & {draft, EVERY}:
                there = ", ".join(self.drafts) or "none"
                raise UserError(f"{source}: no forward time of draft {draft!r} (it has: {there})")

    @property
    def rows(self) -> list[int]:
        """The numbers of rows of the target's forwards; none where every forward takes one time."""
        measured = self.target.measurements
        return [each.batch for each in measured] if len(measured) > 1 else []

    def under(self, configuration: Configuration) -> Profile:
        """The costs under `configuration`. What proposes adds its time to each round; its length
        policies add theirs, where they were measured, to each step of their draft: of several for
        one draft, the mean."""
        times = self
        if self.proposals:
            keys = proposer_keys(configuration, next(iter(self.drafts), ""))
            proposing = sum(self.proposals.get(key, 0.0) for key in keys)
            times = self.model_copy(update={"proposing": proposing})
        return times._with_policies(configuration)

    def _with_policies(self, configuration: Configuration) -> Profile:
        if not self.drafts:
            return self
        seconds: dict[str, list[float]] = {}
        for draft, policy in configuration.policies:
            draft = draft or next(iter(self.drafts))
            seconds.setdefault(draft, []).append(self.policies.get(policy_key(draft, policy), 0.0))
        if not any(map(any, seconds.values())):
            return self
        overhead = {
            draft: self.draft_overhead.get(draft, 0.0) + sum(policies) / len(policies)
            for draft, policies in seconds.items()
        }
        return self.model_copy(update={"draft_overhead": {**self.draft_overhead, **overhead}})

    def t_target(self, width: float = 1, context: float | None = None) -> float:
        """Seconds of a target forward of `width` tokens."""
        return self.target.seconds(width, context)

    def t_draft(
        self, draft: str | None = None, context: float | None = None, width: float = 1
    ) -> float:
        """Seconds of a drafting step: a forward of `width` tokens, one in a chain, and what
        surrounds it. `draft` unset is the pair's first draft."""
        if not self.drafts:
            raise ValueError("the profile has no draft model")
        draft = next(iter(self.drafts)) if draft is None else draft
        if draft not in self.drafts:
            raise ValueError(
                f"no draft {draft!r} in the profile (it has: {', '.join(self.drafts)})"
            )
        forward = self.drafts[draft].seconds(width, context)
        return forward + self.draft_overhead.get(draft, 0.0)

    def target_cost(self, draft: str | None = None, context: float | None = None) -> float:
        """A round's target forward in drafting steps (Post-use & Pre-cut, §5.2), to three digits:
        c = t_target / t_draft, with what the engine adds to both."""
        seconds = self.t_target(1, context) + self.round_overhead
        return float(f"{seconds / self.t_draft(draft, context):.3g}")

    def target_in_candidates(self, draft: str | None = None) -> float:
        """The same in what a candidate takes, t_draft and a place in the target's forward."""
        place = max(self.t_target(1 + CANDIDATES) - self.t_target(1), 0.0) / CANDIDATES
        seconds = self.t_target(1) + self.round_overhead
        return float(f"{seconds / (self.t_draft(draft) + place):.3g}")

    def estimate_seconds(
        self, counts: Counts, draft: str | None = None, context: float | None = None
    ) -> float:
        """Eq. 3.1, t_draft·N_draft + t_target·N_target, with the cost of verifying several tokens.

        A verification feeds the round's candidates and the token before them, so its width is
        1 + drafted on average, and that of a drafting step the places at which it gives a
        distribution: one in a chain, more in a tree. Counts without a drafted token are
        autoregressive decoding's. Prefill is not included.
        """
        if not counts.n_target:
            return 0.0
        if counts.n_drafted:
            width = 1 + counts.n_drafted / counts.n_target
            seconds = self.t_target(width, context) + self.round_overhead
        else:
            seconds = self.autoregressive_seconds(1, context)
        seconds = counts.n_target * (seconds + self.proposing)
        if counts.n_draft:
            # 1, a chain's, where the counts lack it.
            width = max(counts.n_draft_tokens / counts.n_draft, 1.0)
            seconds += counts.n_draft * self.t_draft(draft, context, width)
        return seconds

    def round_seconds(
        self,
        drafted: int,
        draft_forwards: int,
        draft_tokens: int,
        draft: str | None = None,
        context: float | None = None,
    ) -> float:
        """Seconds of a round that verifies `drafted` candidates, from `draft_forwards` forwards of
        the draft model with `draft_tokens` distributions together."""
        counts = Counts(
            n_draft=draft_forwards, n_target=1, n_drafted=drafted, n_draft_tokens=draft_tokens
        )
        return self.estimate_seconds(counts, draft, context)

    def autoregressive_seconds(self, tokens: int, context: float | None = None) -> float:
        """Seconds of decoding `tokens` tokens without drafting."""
        forward = self.autoregressive_forward
        forward = self.t_target(1, context) if forward is None else forward
        return tokens * (forward + self.round_overhead)

    def speedup(
        self, counts: Counts, draft: str | None = None, context: float | None = None
    ) -> float:
        """Predicted improvement factor over autoregressive decoding of the same N tokens; 1 when
        nothing was generated."""
        if not counts.n:
            return 1.0
        alone = self.autoregressive_seconds(counts.n, context)
        return alone / self.estimate_seconds(counts, draft, context)

    def prefill_seconds(self, prompts: Iterable[int], drafts: Iterable[str | None] = ()) -> float:
        """Seconds that the prefill of `prompts` (their numbers of tokens) by the target and by
        `drafts` adds (None is the pair's first draft) to the rounds; 0 where prefill was not
        measured. The target reads a prompt in its first round, in place of a single token."""
        names = {draft or next(iter(self.drafts), "") for draft in drafts}
        models = [self.drafts[name] for name in names if name in self.drafts]
        first = self.t_target()
        return sum(
            max(self.target.prefill_seconds(tokens) - first, 0.0)
            + sum(draft.prefill_seconds(tokens) for draft in models)
            for tokens in prompts
        )

    def save(self, path: str | Path) -> Path:
        return write_atomically(Path(path), self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; a missing or malformed one is a :class:`UserError` that names the file
        and the key."""
        return parse(cls, load_yaml(path), str(path))


def check_rows(rows: Collection[int], source: str) -> None:
    """Raises :class:`UserError`, naming `source`, where forwards of so many rows do not say what a
    row adds, by which several requests at once are simulated."""
    if len(set(rows)) == 1:
        raise UserError(
            f"{source}: forwards of {min(rows)} row(s) alone do not say what those of several"
            " requests at once cost; measure another number of rows, too"
        )


def policy_key(draft: str, policy: PolicySettings) -> str:
    """Identifies what the time of a policy's decision depends on: not its thresholds."""
    return " ".join([draft, policy.kind, *policy.heads])


def proposer_keys(configuration: Configuration, first: str) -> frozenset[str]:
    """The keys of what proposes under a configuration: the kinds of its lookups, and `draft <name>`
    for each draft model; `first` is the pair's first."""
    lookups = (part.kind for part in configuration.parts if not (part.drafts or part.parts))
    return frozenset(lookups) | {draft_key(draft or first) for draft in configuration.drafts}


def draft_key(draft: str) -> str:
    return f"draft {draft}"
