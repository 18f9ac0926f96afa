"""Replay: every round of a configuration from a recording, without a model.

The output is fixed by the target, the prompt and (coupled) the seed. A chain drafted from any
position follows it up to the draft's first disagreement and then goes on as recorded, so the
tokens, entropies, probabilities and hidden states that a round would meet are rows of the trace;
and how far a static tree is accepted follows from the ranks of the target's tokens. What remembers
nothing is evaluated for all starting positions at once. A policy that learns is walked through
round by round. Drafters without a model are run themselves on the recorded texts, and so are
hybrids and bandits, with recorded drafters in the place of those that need a model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec_core.config import (
    BanditDrafter,
    CascadeDrafter,
    Configuration,
    DrafterSettings,
    DraftModelDrafter,
    FixedPolicy,
    ForkDrafter,
    HybridDrafter,
    OraclePolicy,
    Policy,
    PostUseDrafter,
    PromptLookupDrafter,
    RetrievalDrafter,
    SuffixDrafter,
    TokenCacheDrafter,
    TreeDrafter,
)
from specdec_core.cost import Profile, policies_of
from specdec_core.drafters import (
    BanditSpec,
    Drafter,
    Hybrid,
    Outcome,
    Sequencing,
    build_drafter,
)
from specdec_core.errors import UserError
from specdec_core.heads import LoadedHead, load_head
from specdec_core.policies import LengthPolicy, Rule, build_policy
from specdec_core.sampling import RandomStream
from specdec_core.stats import Counts
from specdec_core.token_tree import ROOT, TokenTree
from specdec_core.traces.arms import (
    UNKNOWN,
    Place,
    RecordedCascade,
    RecordedChain,
    RecordedPostUse,
    RecordedResources,
    RecordedTree,
    follow,
)
from specdec_core.traces.rounds import ReplayedRounds, Rounds
from specdec_core.traces.schema import Recording
from specdec_core.traces.track import Track
from specdec_core.traces.verified import verified

# draft, head -> the head
LoadHead = Callable[[str, str], LoadedHead]


class Replay:
    """Runs configurations on a recording; without its `hidden` states no head can be asked, but
    little has to be read.

    A bandit that is rewarded in time needs a `profile`, whose seconds stand for those of its
    rounds: what it then does is modelled. Everything else is what decoding would do; of a
    recording with rejection sampling, which is taken with `drawn`, what decoding its drafts could
    have done (:mod:`specdec_core.traces.verified`).
    """

    def __init__(
        self,
        recording: Recording,
        load_head: LoadHead | None = None,
        hidden: bool = True,
        profile: Profile | None = None,
        drawn: bool = False,
    ) -> None:
        header = recording.header
        if not (header.replayable or (drawn and header.continuations)):
            sampling = "" if drawn else ", and greedy decoding or sampling.coupling gumbel"
            raise UserError(
                f"{recording.folder}: cannot be replayed; that takes continuations{sampling}"
            )
        self.recording, self.header, self.profile = recording, header, profile
        self._load_head = load_head or self._recorded_head
        self._heads: dict[tuple[str, str], LoadedHead] = {}
        self._hidden = hidden
        self._tracks: dict[str, Track] = {}

    def can(self, configuration: Configuration) -> bool:
        """Whether the recording knows all that this configuration could meet."""
        drafter = configuration.drafter
        if configuration.sampling != self.header.sampling:
            return False
        if drafter is None:
            return True
        if not (self.header.sampling.fixed_output or isinstance(drafter, DraftModelDrafter)):
            return False
        # The oracle is no part of anything: nothing that decodes can follow it.
        oracle = any(isinstance(policy, OraclePolicy) for _, policy in policies_of(configuration))
        return self._knows(drafter) and (not oracle or isinstance(drafter, DraftModelDrafter))

    def _knows(self, drafter: DrafterSettings) -> bool:
        match drafter:
            case DraftModelDrafter():
                return self._knows_chains(drafter.draft, drafter.policy)
            case TreeDrafter():
                return self._has(drafter.draft) and self.header.sampling.greedy
            case ForkDrafter():
                # Of branches that the target leaves only the number of tokens is known.
                fixed = isinstance(drafter.policy, FixedPolicy)
                return fixed and self._has(drafter.draft) and self.header.sampling.greedy
            case PromptLookupDrafter() | SuffixDrafter() | RetrievalDrafter():
                return True
            case TokenCacheDrafter():
                # Other phrases are the target's choices behind what was rejected.
                return drafter.learn_from == "output"
            case CascadeDrafter():
                chains = self._knows_chains(drafter.draft, drafter.policy)
                return chains and self._knows(drafter.proposer)
            case PostUseDrafter():
                chains = self._knows_chains(drafter.draft, drafter.policy)
                return chains and self._knows(drafter.cache)
            case HybridDrafter():
                # Of a static tree not all tokens are known, which these look at.
                looks = drafter.merge or drafter.extend
                shaped = any(isinstance(p, TreeDrafter | ForkDrafter) for p in drafter.walk())
                return not (looks and shaped) and all(map(self._knows, drafter.parts))
            case BanditDrafter():
                modelled = drafter.reward == "time" and self.profile is not None
                rewarded = drafter.reward == "tokens" or modelled
                return rewarded and all(map(self._knows, drafter.arms))
        return False

    def _knows_chains(self, draft: str | None, policy: Policy) -> bool:
        # The longest draft of a request is also bounded by its room.
        longest = min(policy.max_tokens, self.header.max_new_tokens - 1)
        return self._has(draft) and longest <= self.header.max_draft

    def _has(self, draft: str | None) -> bool:
        names = list(self.header.pair.drafts)
        return draft in names if draft is not None else bool(names)

    def run(self, configuration: Configuration) -> ReplayedRounds:
        """The rounds that decoding the recorded prompts one after the other would have taken.

        Raises:
            UserError: the recording cannot tell (see :meth:`can`), or the head is unknown.
        """
        if not self.can(configuration):
            raise UserError(
                f"{self.recording.folder}: recorded with {self.header.sampling.model_dump()}, at "
                f"most {self.header.max_draft} candidates and drafts "
                f"{', '.join(self.header.pair.drafts) or 'none'}; cannot replay "
                f"{configuration.label}"
            )
        drafter = configuration.drafter
        match drafter:
            case DraftModelDrafter():
                return self._chains(drafter)
            case TreeDrafter() | ForkDrafter():
                track = self.track(drafter.draft)
                return track.walk_all(track.trees(drafter.children))
        return self._decode(configuration)

    def track(self, draft: str | None = None) -> Track:
        """The recorded draft, indexed by where its rounds begin."""
        name = self.recording.draft_name(draft)
        if name not in self._tracks:
            trace = self.recording.trace(name, self._hidden)
            fixed = self.header.sampling.fixed_output
            self._tracks[name] = Track(trace if fixed else verified(trace))
        return self._tracks[name]

    def values(self, draft: str | None, policy: Policy) -> np.ndarray:
        """What a threshold policy reads off every recorded candidate (R,)."""
        return self.track(draft).values(self.rule(draft, policy))

    def rule(self, draft: str | None, policy: Policy) -> Rule:
        """A threshold policy with what the recording knows of its head. TypeError for others."""
        built = self._policy(draft, policy)
        if not isinstance(built, Rule):
            raise TypeError(f"policy {policy.kind} compares no values")
        return built

    def _policy(self, draft: str | None, policy: Policy) -> LengthPolicy:
        name = self.recording.draft_name(draft)
        return build_policy(policy, lambda head: self._head(name, head))

    def _head(self, draft: str, head: str) -> LoadedHead:
        """Loaded once for all configurations."""
        if (draft, head) not in self._heads:
            self._heads[draft, head] = self._load_head(draft, head)
        return self._heads[draft, head]

    def _recorded_head(self, draft: str, head: str) -> LoadedHead:
        own = self.header.fingerprints
        return load_head(head, own[draft], own["target"])

    def _chains(self, drafter: DraftModelDrafter) -> ReplayedRounds:
        track = self.track(drafter.draft)
        if isinstance(drafter.policy, OraclePolicy):
            most = np.minimum(track.agreeing, drafter.policy.max_tokens)
            return track.walk_all(track.chains(most))
        policy = self._policy(drafter.draft, drafter.policy)
        if isinstance(policy, Rule):
            return track.walk_all(track.chains(track.drafted(policy)))
        return track.walk(policy)

    # Drafters that are run themselves

    def _build(self, settings: DrafterSettings, resources: RecordedResources) -> Drafter:
        """The drafter that `settings` describe, on the recorded draft models."""
        match settings:
            case DraftModelDrafter():
                return RecordedChain(settings, resources)
            case TreeDrafter() | ForkDrafter():
                return RecordedTree(settings.draft, settings.children, resources)
            case CascadeDrafter():
                proposer = self._build(settings.proposer, resources)
                return RecordedCascade(settings, resources, proposer)
            case PostUseDrafter():
                return RecordedPostUse(settings, resources)
            case HybridDrafter():
                return Hybrid(settings, resources, self._build)
            case BanditDrafter():
                return BanditSpec(settings, resources, self._build)
        return build_drafter(settings, resources)

    def _decode(self, configuration: Configuration) -> ReplayedRounds:
        """Decode the recorded prompts, the target being the recorded outputs."""
        drafter, place = None, Place()
        if configuration.drafter is not None:
            resources = RecordedResources(
                _no_model,
                _no_model,
                vocab_size=0,
                eos_token_ids=frozenset(self.header.eos_token_ids),
                track=self.track,
                policy=self._policy,
                place=place,
            )
            drafter = self._build(configuration.drafter, resources)
        seconds = self._clock(configuration)
        rounds = Rounds()
        prompts = self.recording.prompts
        texts = zip(prompts.tokens, prompts.outputs, strict=True)
        for number, (prompt, output) in enumerate(texts):
            output = output.tolist()
            place.prompt, place.length = number, len(prompt)
            # Nothing is drawn from the random stream: the output is fixed.
            sequence = Sequencing(0, prompt.tolist(), configuration.sampling, RandomStream(0))
            if drafter is not None:
                drafter.open([sequence])
            position = 0
            while position < len(output):
                tree = TokenTree()
                if drafter is not None:
                    sequence.room = self.header.max_new_tokens - position - 1
                    [tree] = drafter.propose([sequence])
                rest = output[position:]
                path = follow(tree, rest)
                generated = min(len(path) + 1, len(rest))
                rounds.add(number, position, tree, len(path), generated)
                position += generated
                sequence.tokens += rest[:generated]
                if drafter is None:
                    continue
                if position < len(output):
                    drafter.observe(sequence, _outcome(tree, path, rest, seconds(tree)))
                else:
                    drafter.close(sequence)
        return rounds.done(prompts.ids)

    def _clock(self, configuration: Configuration) -> Callable[[TokenTree], float]:
        """What drafting and verifying a tree takes by the profile, where a bandit is rewarded in
        time; nobody else asks."""
        settings = configuration.drafter
        if not isinstance(settings, BanditDrafter) or settings.reward == "tokens":
            return lambda tree: 0.0
        arms = [
            Configuration(drafter=arm, sampling=configuration.sampling) for arm in settings.arms
        ]
        profiles = [self.profile.under(arm) for arm in arms]
        context = self.recording.prompts.context

        def seconds(tree: TokenTree) -> float:
            counts = Counts(
                requests=1,
                n=1,
                n_draft=tree.draft_forwards,
                n_target=1,
                n_discarded=0,
                n_drafted=len(tree),
                n_accepted=0,
                n_target_tokens=1,
                n_draft_tokens=tree.draft_tokens,
            )
            return profiles[tree.arm].estimate_seconds(counts, arms[tree.arm].draft, context)

        return seconds


def _outcome(tree: TokenTree, path: list[int], rest: list[int], seconds: float) -> Outcome:
    """What became of a tree, as far as it is known: not what the target would have chosen behind
    the nodes that were rejected."""
    choices = [UNKNOWN] * (len(tree) + 1)
    for node, token in zip([ROOT, *path], rest, strict=False):
        choices[node + 1] = token
    return Outcome(tree, path, choices, seconds)


def _no_model(*_: object) -> None:
    raise UserError("this drafter needs a draft model that replay does not run")
