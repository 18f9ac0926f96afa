"""Replay: every round of a configuration from a recording, without a model.

The output is fixed by the target, the prompt and (coupled) the seed. A chain drafted from any
position follows it up to the draft's first disagreement and then continues as recorded. So the
tokens, entropies, probabilities and hidden states that a round would meet are rows of the trace,
and the ranks of the target's tokens tell how far a static tree is accepted. Stateless policies are
evaluated for all starting positions at once, policies that learn run round by round, and drafters
without a model run themselves on the recorded texts. See :mod:`specdec_core.drafting.recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import NoReturn

from specdec_core.base.errors import UserError
from specdec_core.config import (
    Configuration,
    DrafterSettings,
    LookupSettings,
    RecordingFacts,
    run_time,
)
from specdec_core.config.drafters import ChainSettings
from specdec_core.cost import Profile
from specdec_core.drafting.drafter import Outcome, SlotState
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.heads.storage import load_head
from specdec_core.drafting.recorded import UNKNOWN, KnownRounds, RecordedResources
from specdec_core.recordings.rounds import NO_ARM, ReplayedRounds
from specdec_core.recordings.schema import Recording
from specdec_core.recordings.track import Track
from specdec_core.recordings.unrolled import UnrolledTrack
from specdec_core.recordings.verified import verified
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.token_tree import ROOT, TokenTree

Heads = Mapping[tuple[str, str], LoadedHead]  # by draft and name


def check_replayable(recording: Recording, drawn: bool = False) -> None:
    """Raises :class:`UserError` for a recording that cannot replay every draft length;
    where the rounds may be `drawn`, any sampling can."""
    header = recording.header
    if not (header.replayable or (drawn and header.continuations)):
        sampling = "" if drawn else ", and greedy decoding or sampling.coupling gumbel"
        raise UserError(
            f"{recording.folder}: cannot be replayed; that takes continuations{sampling}"
        )


class Replay:
    """Runs configurations on a recording.

    Replayed rounds equal the rounds of decoding, with two exceptions. A bandit that is rewarded in
    time needs a `profile`; its modelled seconds replace the rounds' measured ones. And a recording
    with rejection sampling, accepted only with `drawn`, yields rounds that decoding could have
    taken (:mod:`specdec_core.recordings.verified`). Without `hidden` states, most of a recording is
    not read, and no head can be replayed. Heads that are not among `heads` are read from disk.
    """

    def __init__(
        self,
        recording: Recording,
        heads: Heads | None = None,
        hidden: bool = True,
        profile: Profile | None = None,
        drawn: bool = False,
    ) -> None:
        check_replayable(recording, drawn)
        header = recording.header
        self.recording, self.header, self.profile = recording, header, profile
        self.facts = RecordingFacts(
            drafts=tuple(header.pair.drafts),
            sampling=header.sampling,
            max_draft=header.max_draft,
            max_new_tokens=header.max_new_tokens,
            timed=profile is not None,
            eagle_heads=header.eagle_heads,
        )
        self._heads = dict(heads or {})
        self._hidden = hidden
        self._tracks: dict[str, Track] = {}
        self.decoded: Mapping[str, ReplayedRounds] = {}

    def knowing(self, decoded: Mapping[str, ReplayedRounds]) -> Replay:
        """The same with the rounds of further configurations, by id, that were decoded live: for
        those that the recording cannot tell."""
        more = copy(self)
        more.decoded = {**self.decoded, **decoded}
        return more

    def can(self, configuration: Configuration) -> bool:
        """Whether the recording holds everything that this configuration could meet."""
        return self._unknown(self.priced(configuration)) is None

    def priced(self, configuration: Configuration) -> Configuration:
        """The configuration at the costs of the profile, where there is one."""
        if self.profile is None:
            return configuration
        return configuration.priced(self.profile)

    def _unknown(self, configuration: Configuration) -> str | None:
        """Why this configuration cannot be replayed; None where it can."""
        if configuration.id in self.decoded:
            return None
        drafter, drawn = configuration.drafter, not self.header.sampling.fixed_output
        known = drafter is None or (
            isinstance(drafter, ChainSettings)
            and drafter.guesses is None
            and not drafter.is_eagle(self.facts)
        )
        if drawn and not known:
            return "with rejection sampling only the chains of a draft model are known"
        if reason := configuration.unsupported_reason(self.facts):
            return reason
        if not self._hidden and configuration.reads_hidden:
            return "it reads hidden states, which were not opened"
        return None

    def run(self, configuration: Configuration) -> ReplayedRounds:
        """The rounds of decoding the recorded prompts one after the other. Raises
        :class:`UserError` where the configuration cannot be replayed (see :meth:`can`), or its head
        is unknown."""
        configuration = self.priced(configuration)
        if reason := self._unknown(configuration):
            raise UserError(
                f"{self.recording.folder}: cannot replay {configuration.label}: {reason}"
            )
        if configuration.id in self.decoded:
            return self.decoded[configuration.id]
        if (known := self._known(configuration.drafter)) is not None:
            track, table = known
            return track.walk_all(table)
        return self._decode(configuration)

    def everywhere(self, configuration: Configuration) -> ReplayedRounds:
        """A round from every position of the recorded outputs, as after rounds of other drafters up
        to there; so from the first position, which follows none, the first round, without
        candidates. This is known where the sequence alone decides what is drafted (autoregressive
        decoding, chains with a rule, static trees, lookups). The other drafters remember earlier
        rounds; of theirs only the rounds of :meth:`run` are returned. Raises
        :class:`UserError` as :meth:`run` does."""
        configuration = self.priced(configuration)
        drafter = configuration.drafter
        if configuration.id in self.decoded or self._unknown(configuration) is not None:
            return self.run(configuration)  # which may raise
        if (known := self._known(drafter)) is not None:
            track, table = known
            return track.everywhere(table)
        if drafter is None or (isinstance(drafter, LookupSettings) and not drafter.reads_rejected):
            return self._decode(configuration, everywhere=True)
        return self.run(configuration)

    def _known(self, drafter: DrafterSettings | None) -> tuple[Track, KnownRounds] | None:
        """A drafter's rounds from all starts, where they depend on no earlier round."""
        if drafter is None:
            return None
        table = run_time(drafter).recorded_rounds(drafter, self._resources(lambda: 0))
        return None if table is None else (self.track(drafter.drafts[0]), table)

    def track(self, draft: str | None = None) -> Track:
        """The recorded draft, indexed by where rounds begin."""
        name = self.recording.draft_name(draft)
        if name not in self._tracks:
            trace = self.recording.trace(name, self._hidden)
            fixed = self.header.sampling.fixed_output
            kind = UnrolledTrack if name in self.header.eagle_heads else Track
            self._tracks[name] = kind(trace if fixed else verified(trace))
        return self._tracks[name]

    def _resources(self, start: Callable[[], int]) -> RecordedResources:
        """`start` tells where in all recorded outputs the coming round begins."""
        return RecordedResources(
            _no_model,
            self._head,
            vocab_size=0,
            eos_token_ids=frozenset(self.header.eos_token_ids),
            track=self.track,
            start=start,
        )

    def _head(self, draft: str | None, head: str) -> LoadedHead:
        """Loaded once for all configurations."""
        key = self.recording.draft_name(draft), head
        if key not in self._heads:
            prints = self.header.fingerprints
            self._heads[key] = load_head(head, prints[key[0]], prints["target"])
        return self._heads[key]

    def _decode(self, configuration: Configuration, everywhere: bool = False) -> ReplayedRounds:
        """Decode the recorded prompts, the target being the recorded outputs; with `everywhere`
        each round begins one token after the one before it, whatever that added."""
        drafter, start = None, 0
        if configuration.drafter is not None:
            drafter = self._resources(lambda: start).build(configuration.drafter)
        seconds = self._clock(configuration)
        rounds: list[tuple[int, ...]] = []
        prompts = self.recording.prompts
        texts = zip(prompts.tokens, prompts.outputs, strict=True)
        for number, (prompt, output) in enumerate(texts):
            output = output.tolist()
            # Nothing is drawn from the random stream: the output is fixed.
            sequence = SlotState(0, prompt.tolist(), configuration.sampling, RandomStream(0, 0))
            if drafter is not None:
                drafter.open([sequence])
            position, begin = 0, start
            while position < len(output):
                tree, first = TokenTree(), position == 0
                if drafter is not None and not first:
                    sequence.room = self.header.max_new_tokens - position - 1
                    [tree] = drafter.propose([sequence])
                rest = output[position:]
                path = tree.follow(rest)
                generated = min(len(path) + 1, len(rest))
                shape = tree.draft_forwards, tree.depth, tree.draft_tokens
                arm = NO_ARM if tree.arm is None else tree.arm
                rounds.append((number, position, len(tree), len(path), generated, *shape, arm))
                added = 1 if everywhere else generated
                position += added
                start = begin + position
                sequence.tokens += rest[:added]
                if drafter is None:
                    continue
                if position == len(output):
                    drafter.close(sequence)
                elif first or everywhere:
                    drafter.missed(sequence)
                else:
                    drafter.observe(sequence, _outcome(tree, path, rest, seconds(tree)))
        memory = None if drafter is None else drafter.memory
        state = None if memory is None else memory.state()
        return ReplayedRounds.of_rows(rounds, prompts.ids, state)

    def _clock(self, configuration: Configuration) -> Callable[[TokenTree], float]:
        """Seconds of drafting and verifying a tree, by the profile; 0 without one."""
        profile = self.profile
        if profile is None or configuration.drafter is None:
            return lambda tree: 0.0
        arms: dict[int | None, tuple[Configuration, Profile]] = {}
        context = self.recording.prompts.context

        def seconds(tree: TokenTree) -> float:
            if tree.arm not in arms:
                arm = configuration.by(tree.arm)
                arms[tree.arm] = arm, profile.under(arm)
            arm, cost = arms[tree.arm]
            return cost.round_seconds(
                len(tree), tree.draft_forwards, tree.draft_tokens, arm.draft, context
            )

        return seconds


def _outcome(tree: TokenTree, path: list[int], rest: list[int], seconds: float) -> Outcome:
    """A tree's outcome, as far as the recording tells: the target's choices after rejected nodes
    are unknown."""
    choices = [UNKNOWN] * (len(tree) + 1)
    for node, token in zip([ROOT, *path], rest, strict=False):
        choices[node + 1] = token
    return Outcome(tree, path, choices, seconds)


def _no_model(*_: object) -> NoReturn:
    raise UserError("this drafter needs a draft model that replay does not run")
