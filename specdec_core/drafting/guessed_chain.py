"""A draft model's chain, several tokens a forward: speculative decoding of the draft model itself.

What is guessed about the draft model's next tokens is verified against it by the very rule that the
target applies. So the chain is one that the draft model alone would have written: the same tokens
when greedy, and under sampling every token is drawn from the draft model's own distribution q,
which it carries to the target's verification. Guesses change how many forwards of the draft model a
chain takes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_core.config import PolicySettings
from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.recorded import PolicyChains, RecordedResources
from specdec_core.tokens.acceptance import rule_of
from specdec_core.tokens.sampling import distributions
from specdec_core.tokens.token_tree import Origin, TokenTree


@dataclass(slots=True)
class _Draft:
    """A slot's chain in the making."""

    sequence: SlotState
    limit: int
    tree: TokenTree = field(default_factory=TokenTree)
    feed: list[int] = field(default_factory=list)  # text and chain that was not read yet
    # What the latest forward decided: tokens, the places in its row that they were drawn from and
    # their distributions; and how many new tokens of other slots come before them.
    new: list[tuple[int, int, Tensor | None]] = field(default_factory=list)
    before: int = 0


class GuessedChain(Drafter):
    """Drafts chains from a draft model; `guess` says what may come next, without a model.

    The length policy is asked about one token after the other, as if each had taken a forward of
    its own, and what lies behind the token where it stops is dropped.
    """

    def __init__(self, draft: str | None, policy: PolicySettings, resources: Resources) -> None:
        self.runner = resources.draft_runner(draft)
        self.context = DraftContext(self.runner)
        self.policy = resources.policy(draft, policy)
        self.eos_token_ids = resources.eos_token_ids
        self.clock = resources.clock
        if self.policy.needs_hidden:
            self.runner.watch_hidden(True)
        self._chains: dict[int, tuple[int, int]] = {}  # by slot: length of the text, of the chain

    @classmethod
    def replayed(cls, settings: Any, recorded: RecordedResources) -> GuessedChain:
        kind: Any = type(f"Recorded{cls.__name__}", (cls, RecordedGuesses), {})
        built: GuessedChain = kind(settings, recorded)
        return built

    def guess(self, sequence: SlotState, drafted: Sequence[int], room: int) -> TokenTree:
        """Deterministic candidates for what the draft model writes behind the text and `drafted`,
        at most `room` tokens deep."""
        raise NotImplementedError

    def learn(self, sequence: SlotState, drafted: Sequence[int], outcome: Outcome) -> None:
        """What became of a guess behind `drafted` at the draft model; `outcome.choices` are the
        draft model's most likely tokens."""

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)
        self.context.open(sequences)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        drafts = [_Draft(s, min(s.room, self.policy.limit(s.slot, s.batch))) for s in sequences]
        active = [draft for draft in drafts if draft.limit > 0]
        for draft in active:
            draft.feed = self.context.pending(draft.sequence)
        while active:
            active = self._ask(active, self._forward(active))
        for draft in drafts:
            self._chains[draft.sequence.slot] = len(draft.sequence.tokens), len(draft.tree)
        return [draft.tree for draft in drafts]

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        text, length = self._chains[sequence.slot]
        # The nodes of the chain come first; the draft model has read all of it but, at times, the
        # last one. What else is in the tree it has never seen.
        read = min(self.runner.lengths[sequence.slot] - text, length)
        self.context.keep(sequence, outcome, {node: node for node in range(read)})
        self.judged(sequence, outcome, length)

    def judged(self, sequence: SlotState, outcome: Outcome, length: int) -> None:
        """Tell the policy what became of the chain, the first `length` nodes of the tree."""
        if length:
            accepted = sum(node < length for node in outcome.path)
            told = PolicyOutcome(length, accepted, outcome.tree.draft_forwards)
            self.policy.observe(sequence.slot, told)

    def _forward(self, active: list[_Draft]) -> Signals:
        """One forward of the draft model: reads the feed and the guesses behind it, decides which
        tokens come next, and forgets the other guesses. What there is to know of all these tokens,
        slot by slot."""
        guesses, tokens, parents = [], [], []
        for draft in active:
            drafted = draft.tree.tokens
            # One token comes from the draft model itself.
            room = draft.limit - len(drafted) - 1
            guess = self.guess(draft.sequence, drafted, room) if room > 0 else TokenTree()
            fed = len(draft.feed)
            guesses.append(guess)
            tokens.append(draft.feed + guess.tokens)
            parents.append([*range(-1, fed - 1), *(fed + parent for parent in guess.parents)])
        chains = all(guess.is_chain for guess in guesses)
        rows = [draft.sequence.slot for draft in active]
        logits = self.runner.forward(rows, tokens, None if chains else parents)
        returned = perf_counter()
        choices = self.runner.choices()
        samplings = [draft.sequence.sampling for draft in active]
        probs = distributions(logits, samplings)
        own_probs: Sequence[Tensor | None]
        own_probs = [None] * len(active) if probs is None else probs.unbind()
        pairs = zip(active, guesses, choices, own_probs, strict=True)
        for draft, guess, own, q in pairs:
            self._decide(draft, guess, own, q)
        signals = self._signals(active, logits, probs)
        self.clock.chose(returned, logits)
        return signals

    def _signals(self, active: list[_Draft], logits: Tensor, probs: Tensor | None) -> Signals:
        """What the policy may see of all new tokens, given the logits and distributions (rows,
        width, vocabulary) of the forward."""
        slots, positions, places = [], [], []
        tokens: list[int] = []
        width = logits.shape[1]
        for row, draft in enumerate(active):
            draft.before = len(tokens)
            for position, (token, place, _) in enumerate(draft.new, len(draft.tree) + 1):
                slots.append(draft.sequence.slot)
                tokens.append(token)
                positions.append(position)
                places.append(row * width + place)
        q, hidden = (
            None if own is None else own.flatten(0, 1) for own in (probs, self.runner.hidden)
        )
        signals = Signals(slots, tokens, positions, logits.flatten(0, 1), q, hidden, places)
        signals.fetch(self.policy.reads)
        return signals

    def _decide(
        self, draft: _Draft, guess: TokenTree, choices: list[int], probs: Tensor | None
    ) -> None:
        """The chain's next tokens: the guesses that the draft model accepts and its own token."""
        sequence, chain, slot = draft.sequence, draft.tree, draft.sequence.slot
        first = len(draft.feed) - 1  # place of the distribution behind what was fed
        places = slice(first, first + 1 + len(guess))
        q = None if probs is None else probs[places]
        rule, random = rule_of(sequence.sampling), sequence.random
        at = len(sequence.tokens) + len(chain)
        decided = rule.choices(guess, choices[places], q, random, at)
        verdict = rule.verify(guess, decided, q, random)
        read = self.runner.lengths[slot] - len(guess)
        self.runner.keep(slot, read, verdict.path)
        assert verdict.token is not None  # the draft model has read the whole guess
        tokens = [*(guess.tokens[node] for node in verdict.path), verdict.token]
        drawn = [0, *(node + 1 for node in verdict.path)]
        draft.new = [
            (token, first + place, None if q is None or not rule.carries_q else q[place])
            for token, place in zip(tokens, drawn, strict=True)
        ]
        chain.draft_forwards += 1
        chain.draft_tokens += 1 + len(guess)
        if len(guess):
            self.learn(sequence, chain.tokens, Outcome(guess, verdict.path, choices[places], 0.0))

    def _ask(self, active: list[_Draft], signals: Signals) -> list[_Draft]:
        """Append the new tokens one by one, as far as the policy wants them. The drafts that it
        would have longer still."""
        going_on, step = [], 0
        while active:
            for draft in active:
                token, _, q = draft.new[step]
                draft.tree.add(token, len(draft.tree) - 1, Origin.DRAFT, q)
            open_ended = [
                len(draft.tree) < draft.limit and draft.new[step][0] not in self.eos_token_ids
                for draft in active
            ]
            shown = [n for n, still in enumerate(open_ended) if still or self.policy.learns]
            answers = [False] * len(active)
            if shown:
                asking = perf_counter()
                own = signals.only([active[n].before + step for n in shown])
                for n, answer in zip(shown, self.policy.go_on(own), strict=True):
                    answers[n] = answer and open_ended[n]
                self.clock.asked(asking)
            following, step = [], step + 1
            for draft, answer in zip(active, answers, strict=True):
                if not answer:
                    self._cut(draft)
                elif step == len(draft.new):
                    draft.feed = [draft.tree.tokens[-1]]
                    going_on.append(draft)
                else:
                    following.append(draft)
            active = following
        return going_on

    def _cut(self, draft: _Draft) -> None:
        """Forget what was read beyond the end of the chain."""
        slot = draft.sequence.slot
        end = len(draft.sequence.tokens) + len(draft.tree)
        self.runner.truncate(slot, min(self.runner.lengths[slot], end))


class RecordedGuesses(GuessedChain):
    """A recorded draft model's chain: guesses take part of its forwards and leave its tokens as
    they are. What is guessed, a kind of guessed chain says as ever."""

    def __init__(
        self, draft: str | None, policy: PolicySettings, recorded: RecordedResources
    ) -> None:
        self.policy = recorded.policy(draft, policy)
        self.chains = PolicyChains(draft, self.policy, recorded)
        self.eos_token_ids = recorded.eos_token_ids
        self._lengths: dict[int, int] = {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        return [self._draft(sequence) for sequence in sequences]

    def _draft(self, sequence: SlotState) -> TokenTree:
        tokens, length, limit = self.chains.draft(sequence)
        chain = TokenTree.chain(tokens[:length], Origin.DRAFT)
        drafted = 0
        while drafted < length:
            room = limit - drafted - 1
            guess = TokenTree()
            if room > 0:
                guess = self.guess(sequence, tokens[:drafted], room)
            chain.draft_forwards += 1
            chain.draft_tokens += 1 + len(guess)
            drafted += len(guess.follow(tokens[drafted:])) + 1
        self._lengths[sequence.slot] = length
        return chain

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.judged(sequence, outcome, self._lengths[sequence.slot])
