"""Who proposes: the settings of every drafter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from specdec_core.config.base import Value
from specdec_core.config.policies import FixedPolicy, MaxTokens, Policy

MOST_NODES = 128  # of a token tree; the slots' caches leave room for so many candidates

Width = Annotated[int, Field(ge=1, le=MOST_NODES)]
Branching = Annotated[tuple[Width, ...], Field(min_length=1)]
Shape = Annotated[tuple[int | tuple[int, ...], ...], Field(min_length=1)]
Draft = Annotated[str | None, Field(description="a draft of the pair; unset, the first")]
Memory = Annotated[
    Literal["request", "all"],
    Field(description="what is learned serves the request alone, or all that follow"),
]


class DrafterSettings(Value):
    """What all drafters have in common."""

    @property
    def label(self) -> str:
        """What a person reads in a table."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Candidate tokens behind each other at most: a round adds one more at most."""
        raise NotImplementedError

    @property
    def nodes(self) -> int:
        """Candidate tokens of a round at most."""
        return self.depth

    @property
    def family(self) -> str:
        """Drafters that differ only in their numbers share a family."""
        return self.kind

    @property
    def lossless(self) -> bool:
        """Whether the output provably keeps the target's distribution."""
        return all(part.lossless for part in self.parts)

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        """The drafters that this one is made of."""
        return ()

    def walk(self) -> Iterator[DrafterSettings]:
        """This drafter and, depth first, all that it is made of."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def _check_nodes(self) -> None:
        if self.nodes > MOST_NODES:
            raise ValueError(
                f"{self.kind}: a tree of {self.nodes} nodes, at most {MOST_NODES} are possible"
            )


def _check_guesses(kind: str, nodes: int) -> None:
    if nodes > MOST_NODES:
        raise ValueError(
            f"{kind}: tries {nodes} tokens at the draft model, at most {MOST_NODES} are possible"
        )


def _check_one_ahead(settings: DrafterSettings) -> None:
    """There is one draft beside the target, and it drafts in one way."""
    if sum(part.kind == "pearl" for part in settings.walk()) > 1:
        raise ValueError(f"{settings.kind}: has more than one pearl; only one draft can draft on")


def _shape(branching: tuple[Any, ...]) -> str:
    return "×".join(map(str, branching))


class DraftModelDrafter(DrafterSettings):
    """A small language model drafts a chain; the policy says when to stop."""

    kind: Literal["draft_model"] = "draft_model"
    draft: Draft = None
    policy: Policy = FixedPolicy()

    @property
    def label(self) -> str:
        return f"{self.draft or 'draft'} · {self.policy.label}"

    @property
    def family(self) -> str:
        return self.policy.kind

    @property
    def depth(self) -> int:
        return self.policy.max_tokens


class TreeDrafter(DrafterSettings):
    """A static tree: level i gives each node `branching[i]` children, drawn from the draft model
    without or with replacement; its most likely tokens when greedy. Of numbers alone it is a
    k-configuration (MCSD); a list says how many children each node of the level before has, in
    their order (Sequoia's trees)."""

    kind: Literal["tree"] = "tree"
    draft: Draft = None
    branching: Shape = (4, 2, 2, 1)
    replacement: bool = False

    @field_validator("branching")
    @classmethod
    def _fits(cls, branching: tuple[Any, ...]) -> tuple[Any, ...]:
        """Each list has an entry for every node before it; equal entries become one number."""
        width, found = 1, []
        for level, own in enumerate(branching):
            counts = own if isinstance(own, tuple) else (own,)
            if isinstance(own, tuple) and len(own) != width:
                raise ValueError(f"level {level}: {len(own)} numbers for the {width} nodes before")
            if min(counts, default=0) < 0 or not any(counts):
                raise ValueError(f"level {level}: expected numbers of children, not all of them 0")
            width = sum(own) if isinstance(own, tuple) else width * own
            found.append(counts[0] if len(set(counts)) == 1 else counts)
        return tuple(found)

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """How many children each node of each level has, the text's last token being level 0."""
        levels, width = [], 1
        for own in self.branching:
            levels.append(own if isinstance(own, tuple) else (own,) * width)
            width = sum(levels[-1])
        return tuple(levels)

    @property
    def label(self) -> str:
        drawn = " replaced" if self.replacement else ""
        if any(isinstance(own, tuple) for own in self.branching):
            shape = f"{self.nodes} in {'|'.join(str(sum(own)) for own in self.children)}"
        else:
            shape = _shape(self.branching)
        return f"{self.draft or 'draft'} · tree {shape}{drawn}"

    @property
    def depth(self) -> int:
        return len(self.branching)

    @property
    def nodes(self) -> int:
        width, nodes = 1, 0
        for own in self.branching:
            width = sum(own) if isinstance(own, tuple) else width * own
            nodes += width
        return nodes


class ForkDrafter(DrafterSettings):
    """`width` chains that part at the first token and go on together until the policy would stop
    every one of them (improved MCSD, §3.2 and §3.3)."""

    kind: Literal["fork"] = "fork"
    draft: Draft = None
    width: Width = 4
    replacement: bool = False
    policy: Policy = FixedPolicy()

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()

    @property
    def label(self) -> str:
        drawn = " replaced" if self.replacement else ""
        return f"{self.draft or 'draft'} · fork {self.width}{drawn} {self.policy.label}"

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """How many children each node of each level has at full depth, the text's last token being
        level 0."""
        return (self.width,), *((1,) * self.width,) * (self.depth - 1)

    @property
    def depth(self) -> int:
        return self.policy.max_tokens

    @property
    def nodes(self) -> int:
        return self.width * self.depth


class TargetTreeDrafter(DrafterSettings):
    """A tree that begins with `branching[0]` tokens of the target's own, which the draft model
    continues; the longest accepted path wins (improved MCSD, §3.1). With more than one token to
    begin with the output does *not* keep the target's distribution."""

    kind: Literal["target_tree"] = "target_tree"
    draft: Draft = None
    branching: Branching = (2, 4, 3, 1, 1)
    replacement: bool = False

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()

    @property
    def label(self) -> str:
        drawn = " replaced" if self.replacement else ""
        lossy = "" if self.lossless else " (lossy)"
        return f"{self.draft or 'draft'} · target tree {_shape(self.branching)}{drawn}{lossy}"

    @property
    def lossless(self) -> bool:
        return self.branching[0] == 1

    @property
    def depth(self) -> int:
        return len(self.branching) - 1

    @property
    def nodes(self) -> int:
        return sum(accumulate(self.branching, mul))


class DynamicTreeDrafter(DrafterSettings):
    """Expand the `expand` most confident nodes of a level with `children` candidates each, then
    keep the `keep` most confident of all (EAGLE-2's expand and rerank, on a draft model)."""

    kind: Literal["dynamic_tree"] = "dynamic_tree"
    draft: Draft = None
    expand: Width = 4
    children: Width = 4
    keep: Width = Field(default=24, description="nodes that are sent to verification")
    least: float = Field(
        default=0.0, ge=0, le=1, description="confidence below which a node is left out"
    )
    policy: Policy = FixedPolicy(max_tokens=6)

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()
        expanded = self.expand * (self.depth - 1)  # the draft model reads these
        if expanded > MOST_NODES:
            raise ValueError(
                f"{self.kind}: expands {expanded} nodes (expand {self.expand} on {self.depth - 1} "
                f"levels), at most {MOST_NODES} are possible"
            )

    @property
    def label(self) -> str:
        shape = f"{self.expand}×{self.children}→{self.keep}"
        shape += f" ≥{self.least:g}" if self.least else ""
        return f"{self.draft or 'draft'} · dynamic tree {shape} {self.policy.label}"

    @property
    def depth(self) -> int:
        return self.policy.max_tokens

    @property
    def nodes(self) -> int:
        return self.keep


class PromptLookupDrafter(DrafterSettings):
    """Copy what followed the last n-gram earlier in the text (Saxena's prompt lookup decoding)."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    max_ngram: int = Field(default=3, ge=1, le=16)
    min_ngram: int = Field(default=1, ge=1, le=16)
    max_tokens: MaxTokens = 10

    def model_post_init(self, _: Any) -> None:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}")

    @property
    def label(self) -> str:
        return f"prompt lookup n≤{self.max_ngram} K={self.max_tokens}"

    @property
    def depth(self) -> int:
        return self.max_tokens


class SuffixDrafter(DrafterSettings):
    """What followed the longest suffix of the text that occurred before, in the text itself or
    also in earlier outputs (SuffixDecoding; SAM decoding)."""

    kind: Literal["suffix"] = "suffix"
    min_match: int = Field(default=1, ge=1)
    max_tokens: MaxTokens = 10
    per_match: float = Field(
        default=2.0, ge=0, description="candidates for each matched token at most; 0: no bound"
    )
    tree: bool = Field(default=False, description="so many of the likeliest, not the best chain")
    memory: Memory = "request"

    @property
    def label(self) -> str:
        least = f" ≥{self.min_match}" if self.min_match > 1 else ""
        bound = "" if self.per_match == 2 else f" ×{self.per_match:g}"
        kept = " of all" if self.memory == "all" else ""
        shape = " tree" if self.tree else ""
        return f"suffix{shape}{kept}{least}{bound} K={self.max_tokens}"

    @property
    def depth(self) -> int:
        return self.max_tokens


class RetrievalDrafter(DrafterSettings):
    """What followed the text's last tokens in a datastore, as a tree of the most frequent
    continuations (REST, He et al., 2024)."""

    kind: Literal["retrieval"] = "retrieval"
    datastore: str = Field(description="name or folder of a datastore; `specdec datastore` builds")
    min_match: int = Field(default=1, ge=1)
    max_match: int = Field(default=16, ge=1)
    keep: Width = Field(default=16, description="nodes that are sent to verification")
    max_tokens: MaxTokens = 10

    def model_post_init(self, _: Any) -> None:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} exceeds max_match {self.max_match}")

    @property
    def label(self) -> str:
        least = f" ≥{self.min_match}" if self.min_match > 1 else ""
        return f"retrieval {Path(self.datastore).name}{least} →{self.keep} K={self.max_tokens}"

    @property
    def depth(self) -> int:
        return self.max_tokens

    @property
    def nodes(self) -> int:
        return self.keep


class TokenCacheDrafter(DrafterSettings):
    """Phrases that were useful before, looked up by the last token (Post-use, §5.1)."""

    kind: Literal["token_cache"] = "token_cache"
    phrases: Width = Field(default=4, description="W, phrases looked up at once")
    phrase_length: int = Field(default=5, ge=1, le=32, description="β, tokens behind the key")
    pool: int = Field(default=1000, ge=1, description="κ_pool, keys")
    per_key: int = Field(default=20, ge=1, description="κ_phase, phrases of a key")
    learn_from: Literal["useful", "output"] = Field(
        default="useful", description="USEFUL tokens (Eq. 7), or the output alone"
    )
    from_prompt: bool = Field(default=False, description="begin with the prompt's phrases")
    memory: Memory = "request"

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()

    @property
    def name(self) -> str:
        """What it keeps, without how much of it is looked up."""
        kept = " of all" if self.memory == "all" else ""
        learned = " output" if self.learn_from == "output" else ""
        prompt = " + prompt" if self.from_prompt else ""
        return f"token cache{kept}{learned}{prompt}"

    @property
    def label(self) -> str:
        return f"{self.name} {self.phrases}×{self.phrase_length}"

    @property
    def depth(self) -> int:
        return self.phrase_length

    @property
    def nodes(self) -> int:
        return self.phrases * self.phrase_length


class LookaheadDrafter(DrafterSettings):
    """The target itself iterates a window of guesses beside verification, and the n-grams that
    come out are the candidates (lookahead decoding, Fu et al., 2024)."""

    kind: Literal["lookahead"] = "lookahead"
    window: Width = Field(default=5, description="W, columns of the window")
    ngram: int = Field(default=4, ge=2, le=16, description="N, tokens of an n-gram")
    guesses: Width = Field(default=5, description="G, n-grams verified at once")
    pool: int = Field(default=1000, ge=1, description="keys of the n-gram pool")
    per_key: int = Field(default=20, ge=1, description="n-grams of a key")
    from_prompt: bool = Field(default=True, description="begin with the prompt's n-grams")

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()

    @property
    def label(self) -> str:
        alone = "" if self.from_prompt else " without the prompt's"
        return f"lookahead W={self.window} N={self.ngram} G={self.guesses}{alone}"

    @property
    def depth(self) -> int:
        return self.ngram - 1 + max(self.window - 2, 0)

    @property
    def nodes(self) -> int:
        # The window's first guess is the text's last token.
        return (self.window + self.guesses) * (self.ngram - 1) - 1


Lookup = Annotated[
    PromptLookupDrafter | SuffixDrafter | RetrievalDrafter | TokenCacheDrafter,
    Field(discriminator="kind"),
]


class CascadeDrafter(DrafterSettings):
    """A draft model's chain, itself sped up: cheap proposals are verified against the draft model
    by the rule that the target applies, several tokens a forward."""

    kind: Literal["cascade"] = "cascade"
    draft: Draft = None
    proposer: Lookup = PromptLookupDrafter(max_tokens=4)
    policy: Policy = FixedPolicy()

    @property
    def label(self) -> str:
        return f"{self.draft or 'draft'} · {self.policy.label} ← {self.proposer.label}"

    @property
    def depth(self) -> int:
        return self.policy.max_tokens

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return (self.proposer,)


class PostUseDrafter(DrafterSettings):
    """A draft model with a token cache: reused at the draft model (Post-use, Alg. 2) and behind
    the last tokens of the draft at the target (Alg. 3)."""

    kind: Literal["post_use"] = "post_use"
    draft: Draft = None
    policy: Policy = FixedPolicy(max_tokens=12)
    at_draft: int = Field(default=3, ge=0, le=16, description="W phrases at the draft model")
    at_target: int = Field(default=3, ge=0, le=16, description="W phrases an anchor at the target")
    anchors: int = Field(default=3, ge=1, le=16, description="m, last tokens of the draft")
    cache: TokenCacheDrafter = Field(
        default=TokenCacheDrafter(), description="W is `at_draft` and `at_target`, not its own"
    )

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()
        _check_guesses(self.kind, self.at_draft * self.cache.phrase_length)

    @property
    def label(self) -> str:
        length = self.cache.phrase_length
        where = f"draft {self.at_draft}×{length}, target {self.anchors}×{self.at_target}×{length}"
        return f"{self.draft or 'draft'} · {self.policy.label} + {self.cache.name} ({where})"

    @property
    def depth(self) -> int:
        return self.policy.max_tokens + (self.cache.phrase_length if self.at_target else 0)

    @property
    def nodes(self) -> int:
        phrases = self.at_target * self.anchors * self.cache.phrase_length
        return self.policy.max_tokens + phrases

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return (self.cache,)


class OuroborosDrafter(DrafterSettings):
    """Drafts phrase by phrase, and verified phrases lengthen the draft (Ouroboros, Zhao et al.,
    2024)."""

    kind: Literal["ouroboros"] = "ouroboros"
    draft: Draft = None
    max_tokens: MaxTokens = 12
    phrases: Width = Field(default=3, description="K, phrases tried behind the draft")
    phrase_length: int = Field(default=5, ge=1, le=32, description="β, tokens of a phrase")
    window: int = Field(default=6, ge=1, le=32, description="guesses iterated at the draft model")
    pool: int = Field(default=1000, ge=1)
    per_key: int = Field(default=20, ge=1)

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()
        _check_guesses(self.kind, self.phrases * self.phrase_length + self.window)

    @property
    def label(self) -> str:
        shape = f"K={self.max_tokens} + {self.phrases}×{self.phrase_length}"
        return f"{self.draft or 'draft'} · ouroboros {shape}"

    @property
    def depth(self) -> int:
        return self.max_tokens + self.phrase_length

    @property
    def nodes(self) -> int:
        return self.max_tokens + self.phrases * self.phrase_length


class HybridDrafter(DrafterSettings):
    """A lookup where it finds enough of the text again, another drafter otherwise; or, merged, the
    other drafter's tree with the found phrase in it."""

    kind: Literal["hybrid"] = "hybrid"
    lookup: Lookup = SuffixDrafter()
    otherwise: Drafter = DraftModelDrafter()
    min_match: int = Field(default=2, ge=1, description="tokens found again at least")
    merge: bool = False
    extend: bool = Field(default=False, description="also look up what follows the other's draft")

    def model_post_init(self, _: Any) -> None:
        self._check_nodes()
        if any(part.kind == "target_tree" for part in self.otherwise.walk()):
            raise ValueError(
                "hybrid: a target_tree begins with the target's tokens, what is looked up does not"
            )

    @property
    def label(self) -> str:
        joint = " + " if self.merge else " else "
        behind = " extended" if self.extend else ""
        return f"{self.lookup.label} ≥{self.min_match}{joint}{self.otherwise.label}{behind}"

    @property
    def depth(self) -> int:
        behind = self.lookup.depth if self.extend else 0
        return max(self.lookup.depth, self.otherwise.depth + behind)

    @property
    def nodes(self) -> int:
        found, drafted = self.lookup.nodes, self.otherwise.nodes
        drafted += found if self.extend else 0
        return found + drafted if self.merge else max(found, drafted)

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return self.lookup, self.otherwise


class BanditDrafter(DrafterSettings):
    """Chooses a drafter for each round and learns from what was accepted (BanditSpec).

    In a file an arm may be a drafter, a policy (of the first draft model), a whole number K, or a
    whole configuration.
    """

    kind: Literal["bandit"] = "bandit"
    rule: Literal["ucb", "exp3"] = "ucb"
    reward: Literal["tokens", "time"] = Field(
        default="tokens", description="tokens a round (the paper's), or tokens a millisecond"
    )
    confidence: float = Field(default=0.05, gt=0, lt=1, description="δ of UCBSpec")
    exploration: float = Field(
        default=1.0, ge=0, description="scales UCBSpec's confidence radius; 1 is the paper's"
    )
    memory: Memory = "all"
    state: str | None = Field(default=None, description="a saved state to start from")
    seed: int = Field(default=0, ge=0)
    arms: tuple[Drafter, ...]

    @field_validator("arms", mode="before")
    @classmethod
    def _read_arms(cls, arms: Any) -> Any:
        return [read_arm(arm) for arm in arms] if isinstance(arms, list | tuple) else arms

    @field_validator("arms")
    @classmethod
    def _enough(cls, arms: tuple[Drafter, ...]) -> tuple[Drafter, ...]:
        if len(set(arms)) < 2 or len(set(arms)) < len(arms):
            raise ValueError("a bandit chooses among at least two arms, each given once")
        return arms

    def model_post_init(self, _: Any) -> None:
        _check_one_ahead(self)

    @property
    def title(self) -> str:
        """The rule, without its arms."""
        name = {"ucb": "UCBSpec", "exp3": "EXP3Spec"}[self.rule]
        scaled = "" if self.exploration == 1 else f" ×{self.exploration:g}"
        timed = " by time" if self.reward == "time" else ""
        own = " per request" if self.memory == "request" else ""
        return f"{name}{scaled}{timed}{own}"

    @property
    def label(self) -> str:
        return f"{self.title} of {', '.join(arm.label for arm in self.arms)}"

    @property
    def family(self) -> str:
        return f"{self.rule}_time" if self.reward == "time" else self.rule

    @property
    def depth(self) -> int:
        return max(arm.depth for arm in self.arms)

    @property
    def nodes(self) -> int:
        return max(arm.nodes for arm in self.arms)

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return self.arms


ChainDrafter = Annotated[DraftModelDrafter | CascadeDrafter, Field(discriminator="kind")]


class PearlDrafter(DrafterSettings):
    """A draft model, by itself or sped up by a lookup, drafts on, on a device of its own, while the
    target verifies (PEARL)."""

    kind: Literal["pearl"] = "pearl"
    drafter: ChainDrafter = DraftModelDrafter()
    window: MaxTokens = Field(default=12, description="candidates verified at once at most")
    wait: int | None = Field(
        default=None,
        ge=0,
        description="candidates waited for behind a rejection; 0: none, as PEARL's"
        " pre-verification; unset: as many as pay, by the forwards' times",
    )
    width: int = Field(
        default=1,
        ge=1,
        le=16,
        description="places that a forward of the draft looks at: the candidates' end, and so many"
        " less 1 behind what the target may say instead of one of them. For where a forward of a"
        " few tokens takes as long as one of a single token; 1 is PEARL as published",
    )
    least: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="the chance, as the draft sees it, from which on such a place is worth a look",
    )

    def model_post_init(self, _: Any) -> None:
        if self.wait is not None and self.wait > self.window:
            raise ValueError(f"pearl: wait {self.wait} exceeds window {self.window}")

    @property
    def label(self) -> str:
        wait = "" if self.wait is None else f" wait {self.wait}"
        width = "" if self.width == 1 else f" width {self.width}"
        if self.width > 1 and self.least != 0.1:
            width += f" from {self.least:g}"
        return f"PEARL · {self.drafter.label} ≤{self.window}{wait}{width}"

    @property
    def depth(self) -> int:
        # The last one is judged, but not fed.
        return self.window + 1

    @property
    def ahead(self) -> int:
        """Tokens that are drafted beyond what is confirmed, at most: a window that is being
        verified, and the next."""
        return 2 * self.window + 1

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return (self.drafter,)


_POLICIES = {kind.model_fields["kind"].default for kind in get_args(get_args(Policy)[0])}


def read_arm(value: Any) -> Any:
    """An arm as the drafter it means."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"kind": "fixed", "max_tokens": value}
    if isinstance(value, dict) and "kind" not in value and "drafter" in value:
        return value["drafter"]
    if isinstance(value, dict) and value.get("kind") in _POLICIES:
        return {"kind": "draft_model", "policy": value}
    return value


Drafter = Annotated[
    DraftModelDrafter
    | TreeDrafter
    | ForkDrafter
    | TargetTreeDrafter
    | DynamicTreeDrafter
    | PromptLookupDrafter
    | SuffixDrafter
    | RetrievalDrafter
    | TokenCacheDrafter
    | LookaheadDrafter
    | CascadeDrafter
    | PostUseDrafter
    | OuroborosDrafter
    | HybridDrafter
    | BanditDrafter
    | PearlDrafter,
    Field(discriminator="kind"),
]
HybridDrafter.model_rebuild()
BanditDrafter.model_rebuild()
