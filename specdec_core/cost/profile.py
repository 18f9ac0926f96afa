"""A pair's forward costs on one machine, and the cost of counts of forward passes.

N_draft, N_target and N_discarded measure a configuration's work and do not depend on the hardware;
a :class:`Profile` gives the cost of that work on one machine. Together they predict the time of any
configuration (SpecDec++, Eq. 3.1, 3.2 and 5.1) without running it. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import CANDIDATES, Configuration, PolicySettings, Value, describe
from specdec_core.cost.forward import ForwardCost
from specdec_core.tokens.statistics import Counts


class Profile(Value):
    """What forwards of a pair cost on one machine.

    `round_overhead` and `draft_overhead` are seconds that the engine adds to a round and to a
    drafting step around the forwards themselves, and `row_overhead` to a step for each further
    request that decodes in it; `mixes` says whether a forward of the target has prompts and
    candidates together. `autoregressive_forward` is the target's forward
    when decoding without drafting, where it is known to differ from a round's; unset, it is that
    of one token. `policies` are seconds that a length policy takes for a candidate token, by
    :func:`policy_key`. `proposals` are seconds that a round takes longer where something proposes,
    apart from drafting steps, by :func:`proposer_keys`; `proposing` is their sum
    :meth:`under` a configuration. `whole_chains` says that every round drafts all candidates of a
    chain, also where the sequence ends sooner, as vLLM does.
    """

    target: ForwardCost
    drafts: dict[str, ForwardCost]
    device: str
    target_dtype: str
    draft_dtype: str
    threads: int = 1
    round_overhead: float = 0.0
    draft_overhead: dict[str, float] = Field(default_factory=dict)
    row_overhead: float = 0.0
    mixes: bool = True
    autoregressive_forward: float | None = None
    policies: dict[str, float] = Field(default_factory=dict)
    proposals: dict[str, float] = Field(default_factory=dict)
    proposing: float = 0.0
    whole_chains: bool = False

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
        """Read a saved profile; a missing or malformed one is a :class:`UserError`."""
        try:
            return cls.model_validate_json(Path(path).read_text())
        except (FileNotFoundError, IsADirectoryError):
            raise UserError(f"{path}: no such profile") from None
        except ValidationError as error:
            raise UserError(f"{path}: not a profile: {describe(error)}") from None


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
