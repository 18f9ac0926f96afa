"""A draft model's chain, several tokens a forward: speculative decoding of the draft model itself.

Guesses at the draft model's next tokens are verified against it by the rule that the target
applies. So the chain is the draft model's: the same tokens when greedy, and under sampling every
token is drawn from the draft model's own distribution q, which it carries to the target's
verification. Guesses only change how many forwards of the draft model a chain takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
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
from specdec_core.drafting.warped import warped
from specdec_core.models.runner import Batch, Output
from specdec_core.tokens.acceptance import VerifierOutput, rule_of
from specdec_core.tokens.sampling import distributions
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree
from specdec_core.tokens.topology import after_text


@dataclass(slots=True)
class _Draft:
    """A slot's chain in progress."""

    state: SlotState
    limit: int
    tree: TokenTree = field(default_factory=TokenTree)
    feed: list[int] = field(default_factory=list)  # unread tokens of text and chain
    # The latest forward's tokens, the places in its row that they were drawn at, and their
    # distributions; and how many new tokens of other slots come before them.
    new: list[tuple[int, int, Tensor | None]] = field(default_factory=list)
    before: int = 0


class GuessedChain(Drafter):
    """Drafts chains from a draft model; `guess` predicts its tokens without a model.

    The length policy is asked about one token after the other, and knows which of them took a
    forward. The tokens after the one where it stops are dropped.
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
        """Deterministic candidates for the draft model's tokens after the text and `drafted`, at
        most `room` tokens deep."""
        raise NotImplementedError

    def learn(self, sequence: SlotState, drafted: Sequence[int], outcome: Outcome) -> None:
        """The draft model's verdict on a guess after `drafted`; `outcome.choices` are its most
        likely tokens."""

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        drafts = [
            _Draft(s, min(self.context.room(s), self.policy.limit(s.slot, s.batch)))
            for s in sequences
        ]
        active = [draft for draft in drafts if draft.limit > 0]
        for draft in active:
            draft.feed = self.context.pending(draft.state)
        while active:
            active = self._extend(active, self._forward(active))
        for draft in drafts:
            self._chains[draft.state.slot] = len(draft.state.tokens), len(draft.tree)
        return [draft.tree for draft in drafts]

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        text, length = self._chains[sequence.slot]
        # The nodes of the chain come first. The draft model has read them, at times without the
        # last one, and no other node.
        read = min(self.runner.lengths[sequence.slot] - text, length)
        self.context.keep(sequence, outcome, {node: node for node in range(read)})
        self.judged(sequence, outcome, length)

    def judged(self, sequence: SlotState, outcome: Outcome, length: int) -> None:
        """Report to the policy the outcome of the chain, the first `length` nodes of the tree."""
        if length:
            accepted = sum(node < length for node in outcome.path)
            reused = len(outcome.path) - accepted
            useful = outcome.useful(length) if self.policy.reads_rejected else None
            calls = outcome.tree.draft_forwards
            result = PolicyOutcome(length, accepted, calls, reused, useful)
            self.policy.observe(sequence.slot, result)

    def _forward(self, active: list[_Draft]) -> Signals:
        """One forward of the draft model: reads the feed and the guesses after it, verifies the
        guesses, and forgets the rejected ones. Returns the signals of all new tokens, slot by
        slot."""
        guesses, tokens, parents = [], [], []
        for draft in active:
            drafted = draft.tree.tokens
            # The draft model adds a token of its own.
            room = draft.limit - len(drafted) - 1
            guess = self.guess(draft.state, drafted, room) if room > 0 else TokenTree()
            guesses.append(guess)
            tokens.append(draft.feed + guess.tokens)
            parents.append(after_text(len(draft.feed), guess.parents))
        rows, counts = [draft.state.slot for draft in active], [1 + len(g) for g in guesses]
        output = self.runner.forward(Batch(rows, tokens, parents, counts))
        returned = perf_counter()
        output = warped(
            output,
            [draft.state for draft in active],
            lambda n: [
                [*active[n].tree.tokens, *guesses[n].path(node)]
                for node in range(ROOT, len(guesses[n]))
            ],
        )
        owners = zip(active, counts, strict=True)
        samplings = [draft.state.sampling for draft, count in owners for _ in range(count)]
        probs = distributions(output.logits, samplings)
        split: Sequence[Tensor | None]
        split = [None] * len(active) if probs is None else probs.split(counts)
        chosen = iter(output.chosen.tolist())
        for draft, guess, count, q in zip(active, guesses, counts, split, strict=True):
            self._decide(draft, guess, list(islice(chosen, count)), q)
        signals = self._signals(active, output, probs)
        self.clock.chose(returned, output.logits)
        return signals

    def _signals(self, active: list[_Draft], output: Output, probs: Tensor | None) -> Signals:
        """The signals of all new tokens, given the forward's output and distributions
        (n, vocabulary)."""
        slots, positions, places, calls = [], [], [], []
        tokens: list[int] = []
        first = 0
        for draft, count in zip(active, output.counts, strict=True):
            draft.before = len(tokens)
            for position, (token, place, _) in enumerate(draft.new, len(draft.tree) + 1):
                slots.append(draft.state.slot)
                tokens.append(token)
                positions.append(position)
                places.append(first + place)
                calls.append(draft.tree.draft_forwards)
            first += count
        signals = Signals(
            slots,
            tokens,
            positions,
            output.logits,
            probs,
            output.hidden,
            places,
            calls,
            source=output if probs is None else None,
        )
        signals.fetch(self.policy.reads)
        return signals

    def _decide(
        self, draft: _Draft, guess: TokenTree, choices: list[int], q: Tensor | None
    ) -> None:
        """The chain's next tokens: the guesses that the draft model accepts and its own token.
        `choices` (1 + nodes) and `q` (1 + nodes, vocabulary) are the draft model's."""
        sequence, chain, slot = draft.state, draft.tree, draft.state.slot
        rule, start = rule_of(sequence.sampling), len(sequence.tokens) + len(chain)
        reading = VerifierOutput(guess, choices, q, sequence.random, start)
        verdict = rule.verify(reading, rule.choices(reading))
        read = self.runner.lengths[slot] - len(guess)
        self.runner.keep(slot, read, verdict.path)
        assert verdict.token is not None  # the draft model has read the whole guess
        tokens = [*(guess.tokens[node] for node in verdict.path), verdict.token]
        drawn = [0, *(node + 1 for node in verdict.path)]
        draft.new = [
            (token, place, None if q is None or not rule.carries_q else q[place])
            for token, place in zip(tokens, drawn, strict=True)
        ]
        chain.draft_forwards += 1
        chain.draft_tokens += 1 + len(guess)
        if len(guess):
            self.learn(sequence, chain.tokens, Outcome(guess, verdict.path, choices, 0.0))

    def _extend(self, active: list[_Draft], signals: Signals) -> list[_Draft]:
        """Append the new tokens one by one until the policy stops. Returns the drafts that need
        another forward."""
        unfinished, step = [], 0
        while active:
            for draft in active:
                token, _, q = draft.new[step]
                draft.tree.add(token, len(draft.tree) - 1, TokenOrigin.DRAFT, q)
            open_ended = [
                len(draft.tree) < draft.limit and draft.new[step][0] not in self.eos_token_ids
                for draft in active
            ]
            shown = [n for n, open_ in enumerate(open_ended) if open_ or self.policy.learns]
            answers = [False] * len(active)
            if shown:
                asking = perf_counter()
                current = signals.only([active[n].before + step for n in shown])
                current.free = [open_ended[n] and step + 1 < len(active[n].new) for n in shown]
                for n, answer in zip(shown, self.policy.go_on(current), strict=True):
                    answers[n] = answer and open_ended[n]
                self.clock.asked(asking)
            following, step = [], step + 1
            for draft, answer in zip(active, answers, strict=True):
                if not answer:
                    self._cut(draft)
                elif step == len(draft.new):
                    draft.feed = [draft.tree.tokens[-1]]
                    unfinished.append(draft)
                else:
                    following.append(draft)
            active = following
        return unfinished

    def _cut(self, draft: _Draft) -> None:
        """Forget tokens that were read beyond the end of the chain."""
        slot = draft.state.slot
        end = len(draft.state.tokens) + len(draft.tree)
        self.runner.truncate(slot, min(self.runner.lengths[slot], end))


class RecordedGuesses(GuessedChain):
    """A recorded draft model's chain: guesses save some of its forwards and leave its tokens as
    they are. :meth:`GuessedChain.guess` and `learn` stay those of the kind."""

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
        tokens, goes_on, limit = self.chains.asked(sequence)
        calls = draft_tokens = drafted = 0
        more = bool(tokens)
        while more:
            room = limit - drafted - 1
            guess = TokenTree()
            if room > 0:
                guess = self.guess(sequence, tokens[:drafted], room)
            calls += 1
            draft_tokens += 1 + len(guess)
            end = min(drafted + len(guess.follow(tokens[drafted:])) + 1, len(tokens))
            while more and drafted < end:
                drafted += 1
                more = goes_on(drafted, calls, drafted < end)
        self._lengths[sequence.slot] = drafted
        chain = TokenTree.chain(tokens[:drafted], TokenOrigin.DRAFT)
        chain.draft_forwards, chain.draft_tokens = calls, draft_tokens
        return chain

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.judged(sequence, outcome, self._lengths[sequence.slot])
