"""A draft model's chain: one candidate a forward, or several where guesses help.

Guesses at the draft model's next tokens are verified against it by the rule that the target
applies: speculative decoding of the draft model itself. The chain stays the draft model's. It has
the same tokens when greedy. Under sampling every token is drawn from the draft model's own
distribution q, which it carries to the target's verification. Guesses only change the number of
forwards of the draft model that a chain takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

from specdec_core.config import PolicyDrafterSettings
from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.warped import places, warped
from specdec_core.models.runner import Batch, Output
from specdec_core.tokens.acceptance import VerifierOutput, rule_of
from specdec_core.tokens.sampling import distributions
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree
from specdec_core.tokens.topology import after_text


@dataclass(slots=True)
class ChainInProgress:
    """A slot's chain of at most `limit` tokens."""

    state: SlotState
    limit: int
    tree: TokenTree = field(default_factory=TokenTree)
    unread: list[int] = field(default_factory=list)  # tokens of the sequence and of the chain
    # The latest forward's tokens and the distributions that they carry. `before` is the number of
    # new tokens of other slots before them.
    new: list[tuple[int, Tensor | None]] = field(default_factory=list)
    before: int = 0
    guessed: Outcome | None = None  # the draft model's verdict on the latest guess


class ChainModel:
    """What the tokens of chains come from: a draft model, or a recording of one."""

    def room(self, sequence: SlotState) -> int:
        """The most tokens of a chain in the coming round."""
        raise NotImplementedError

    def begin(self, draft: ChainInProgress) -> None:
        """A chain begins."""

    def forward(
        self,
        drafts: Sequence[ChainInProgress],
        guesses: Sequence[TokenTree] | None,
        reads: Sequence[str],
    ) -> Signals:
        """Read the ends of the chains, and `guesses` after them. Sets each chain's new tokens;
        returns their signals, slot by slot, with the values `reads`."""
        raise NotImplementedError

    def keep(self, sequence: SlotState, outcome: Outcome, length: int) -> None:
        """The round is committed; the chain was the first `length` nodes of its tree."""

    def cut(self, draft: ChainInProgress) -> None:
        """A chain has ended; tokens that were read beyond its end are forgotten."""


class ChainDrafter(Drafter):
    """Drafts chains from a draft model, or from a recording of one.

    The length policy decides after each token, and knows which tokens took a forward. The tokens
    after the one where it stops are dropped. A subclass with `guesses` predicts the draft model's
    tokens in :meth:`guess`.
    """

    guesses = True

    def __init__(self, settings: PolicyDrafterSettings, resources: Resources) -> None:
        draft = settings.draft
        self.model: ChainModel = resources.recorded_chain(draft) or LiveChainModel(draft, resources)
        self.policy = resources.policy(draft, settings.policy)
        self.eos_token_ids = resources.eos_token_ids
        self.clock = resources.clock
        self._lengths: dict[int, int] = {}  # of the latest chain, by slot

    def guess(self, sequence: SlotState, drafted: Sequence[int], room: int) -> TokenTree:
        """Deterministic candidates for the draft model's tokens after the sequence and `drafted`,
        at most `room` tokens deep."""
        raise NotImplementedError

    def learn(self, sequence: SlotState, drafted: Sequence[int], outcome: Outcome) -> None:
        """The draft model's verdict on a guess after `drafted`; `outcome.choices` are its most
        likely tokens."""

    def open(self, sequences: Sequence[SlotState]) -> None:
        super().open(sequences)
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        drafts = [
            ChainInProgress(s, min(self.model.room(s), self.policy.limit(s.slot)))
            for s in sequences
        ]
        active = [draft for draft in drafts if draft.limit > 0]
        for draft in active:
            self.model.begin(draft)
        while active:
            active = self._extend(active, self._forward(active))
        for draft in drafts:
            self._lengths[draft.state.slot] = len(draft.tree)
        return [draft.tree for draft in drafts]

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        super().observe(sequence, outcome)
        length = self._lengths[sequence.slot]
        self.model.keep(sequence, outcome, length)
        if length:
            # The nodes of the chain come first; the other nodes took no draft.
            accepted = sum(node < length for node in outcome.path)
            reused = len(outcome.path) - accepted
            calls = outcome.tree.draft_forwards
            self.policy.observe(sequence.slot, PolicyOutcome(length, accepted, calls, reused))

    def _forward(self, active: list[ChainInProgress]) -> Signals:
        """One forward of the draft model. Returns the signals of all new tokens, slot by slot."""
        if not self.guesses:
            # The answer after the last possible candidate is not needed.
            last = all(len(draft.tree) + 1 == draft.limit for draft in active)
            return self.model.forward(
                active, None, () if last and not self.policy.learns else self.policy.reads
            )
        guesses = []
        for draft in active:
            drafted = draft.tree.tokens
            room = draft.limit - len(drafted) - 1  # the draft model adds a token
            guesses.append(self.guess(draft.state, drafted, room) if room > 0 else TokenTree())
        signals = self.model.forward(active, guesses, self.policy.reads)
        for draft in active:
            if draft.guessed is not None:
                self.learn(draft.state, draft.tree.tokens, draft.guessed)
        return signals

    def _extend(self, active: list[ChainInProgress], signals: Signals) -> list[ChainInProgress]:
        """Append the new tokens one by one until the policy stops. Returns the chains that need
        another forward."""
        unfinished, step = [], 0
        while active:
            for draft in active:
                token, q = draft.new[step]
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
                    self.model.cut(draft)
                elif step == len(draft.new):
                    unfinished.append(draft)
                else:
                    following.append(draft)
            active = following
        return unfinished


class LiveChainModel(ChainModel):
    """Runs the draft model."""

    def __init__(self, draft: str | None, resources: Resources) -> None:
        self.runner = resources.draft_runner(draft)
        self.context = DraftContext(self.runner)
        self.clock = resources.clock

    def room(self, sequence: SlotState) -> int:
        return self.context.room(sequence)

    def begin(self, draft: ChainInProgress) -> None:
        draft.unread = self.context.pending(draft.state)

    def forward(
        self,
        drafts: Sequence[ChainInProgress],
        guesses: Sequence[TokenTree] | None,
        reads: Sequence[str],
    ) -> Signals:
        if guesses is None:
            signals = self._draw(drafts, reads)
        else:
            signals = self._verify(drafts, guesses, reads)
        for draft in drafts:
            draft.unread = [draft.new[-1][0]]
        return signals

    def keep(self, sequence: SlotState, outcome: Outcome, length: int) -> None:
        self.context.keep(sequence, outcome, range(length))

    def cut(self, draft: ChainInProgress) -> None:
        slot, end = draft.state.slot, len(draft.state.tokens) + len(draft.tree)
        if self.runner.length(slot) > end:
            self.runner.truncate(slot, end)

    def _draw(self, drafts: Sequence[ChainInProgress], reads: Sequence[str]) -> Signals:
        """The next token of each chain."""
        slots = [draft.state.slot for draft in drafts]
        states = [draft.state for draft in drafts]
        output = self.runner.forward(
            Batch(slots, [draft.unread for draft in drafts], wanted=[1] * len(drafts))
        )
        returned = perf_counter()
        output = warped(output, states, lambda n: [drafts[n].tree.tokens])
        positions = [len(draft.state.tokens) + len(draft.tree) for draft in drafts]
        at = places(states, positions, output)
        signals = Signals(
            slots,
            at.draw(),
            [len(draft.tree) + 1 for draft in drafts],
            output,
            at.probs,
            output.hidden,
        )
        signals.fetch(reads)
        self.clock.chose(returned, self.runner.device)
        for n, (draft, token, q) in enumerate(
            zip(drafts, signals.tokens, at.carried(), strict=True)
        ):
            draft.new, draft.before = [(token, q)], n
            draft.tree.draft_forwards += 1
            draft.tree.draft_tokens += 1
        return signals

    def _verify(
        self,
        drafts: Sequence[ChainInProgress],
        guesses: Sequence[TokenTree],
        reads: Sequence[str],
    ) -> Signals:
        """The next tokens of each chain: the guesses that the draft model accepts, and its own
        token. Rejected guesses are forgotten."""
        rows, counts = [draft.state.slot for draft in drafts], [1 + len(g) for g in guesses]
        pairs = list(zip(drafts, guesses, strict=True))
        tokens = [draft.unread + guess.tokens for draft, guess in pairs]
        parents = [after_text(len(draft.unread), guess.parents) for draft, guess in pairs]
        output = self.runner.forward(Batch(rows, tokens, parents, counts))
        returned = perf_counter()
        output = warped(
            output,
            [draft.state for draft in drafts],
            lambda n: [
                [*drafts[n].tree.tokens, *guesses[n].path(node)]
                for node in range(ROOT, len(guesses[n]))
            ],
        )
        samplings = [
            draft.state.sampling
            for draft, count in zip(drafts, counts, strict=True)
            for _ in range(count)
        ]
        greedy = all(sampling.greedy for sampling in samplings)
        probs = None if greedy else distributions(output.logits, samplings)
        split: Sequence[Tensor | None]
        split = [None] * len(drafts) if probs is None else probs.split(counts)
        chosen = iter(output.chosen.tolist())
        accepted = [
            self._decide(draft, guess, list(islice(chosen, count)), q)
            for draft, guess, count, q in zip(drafts, guesses, counts, split, strict=True)
        ]
        signals = _signals(drafts, accepted, output, probs)
        signals.fetch(reads)
        self.clock.chose(returned, self.runner.device)
        return signals

    def _decide(
        self, draft: ChainInProgress, guess: TokenTree, choices: list[int], q: Tensor | None
    ) -> list[int]:
        """Set a chain's next tokens; returns the places of the row at which they were drawn.
        `choices` (1 + nodes) and `q` (1 + nodes, vocabulary) are the draft model's."""
        sequence, chain, slot = draft.state, draft.tree, draft.state.slot
        rule, start = rule_of(sequence.sampling), len(sequence.tokens) + len(chain)
        reading = VerifierOutput(guess, choices, q, sequence.random, start)
        verdict = rule.verify(reading, rule.choices(reading))
        self.runner.keep(slot, self.runner.length(slot) - len(guess), verdict.path)
        assert verdict.token is not None  # the draft model has read the whole guess
        tokens = [*(guess.tokens[node] for node in verdict.path), verdict.token]
        places = [0, *(node + 1 for node in verdict.path)]
        draft.new = [
            (token, None if q is None or not rule.carries_q else q[place])
            for token, place in zip(tokens, places, strict=True)
        ]
        chain.draft_forwards += 1
        chain.draft_tokens += 1 + len(guess)
        draft.guessed = Outcome(guess, verdict.path, choices, 0.0) if len(guess) else None
        return places


def _signals(
    drafts: Sequence[ChainInProgress],
    accepted: Sequence[Sequence[int]],
    output: Output,
    probs: Tensor | None,
) -> Signals:
    """The signals of all new tokens, given the forward's output and distributions
    (n, vocabulary); `accepted` are the tokens' places in their rows."""
    rows: list[tuple[int, int, int, int, int]] = []
    first = 0
    for draft, row, count in zip(drafts, accepted, output.counts, strict=True):
        slot, tree = draft.state.slot, draft.tree
        draft.before = len(rows)
        for position, ((token, _), place) in enumerate(
            zip(draft.new, row, strict=True), len(tree) + 1
        ):
            rows.append((slot, token, position, first + place, tree.draft_forwards))
        first += count
    slots, tokens, positions, places, calls = map(list, zip(*rows, strict=True))
    return Signals(slots, tokens, positions, output, probs, output.hidden, places, calls)
