"""A small language model drafts a chain, one forward pass a token, until the policy says stop."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.recorded import PolicyChains, Recorded, RecordedResources
from specdec_core.drafting.warped import warped
from specdec_core.models.runner import Batch
from specdec_core.tokens.acceptance import Places
from specdec_core.tokens.token_tree import TokenOrigin, TokenTree


class DraftModelDrafter(Drafter):
    """Drafts chains from a draft of the pair."""

    def __init__(self, settings: DraftModelSettings, resources: Resources) -> None:
        self.runner = resources.draft_runner(settings.draft)
        self.context = DraftContext(self.runner)
        self.policy = resources.policy(settings.draft, settings.policy)
        self.eos_token_ids = resources.eos_token_ids
        self.clock = resources.clock
        if self.policy.needs_hidden:
            self.runner.watch_hidden(True)
        self.runner.lazy = self.runner.lazy or self.policy.rests

    @classmethod
    def replayed(cls, settings: DraftModelSettings, recorded: RecordedResources) -> RecordedChain:
        return RecordedChain(settings, recorded)

    @classmethod
    def replayed_at_once(cls, settings: DraftModelSettings, recorded: RecordedResources) -> Any:
        track = recorded.track(settings.draft)
        policy = recorded.policy(settings.draft, settings.policy)
        lengths = policy.lengths(track)
        return track.walk(policy) if lengths is None else track.walk_all(track.chains(lengths))

    @classmethod
    def replayed_everywhere(cls, settings: DraftModelSettings, recorded: RecordedResources) -> Any:
        track = recorded.track(settings.draft)
        lengths = recorded.policy(settings.draft, settings.policy).lengths(track)
        return None if lengths is None else track.everywhere(track.chains(lengths))

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        trees = [TokenTree() for _ in sequences]
        limits = [min(self.context.room(s), self.policy.limit(s.slot, s.batch)) for s in sequences]
        active = [i for i, limit in enumerate(limits) if limit > 0]
        feed = {i: self.context.pending(sequences[i]) for i in active}
        while active:
            drafting = [sequences[i] for i in active]
            drafted = [trees[i].tokens for i in active]
            # The policy need not be asked about the last possible candidates.
            ends = [len(tokens) + 1 == limits[i] for i, tokens in zip(active, drafted, strict=True)]
            reads = () if all(ends) and not self.policy.learns else self.policy.reads
            signals, probs = self._draft(drafting, [feed[i] for i in active], drafted, reads)
            tokens = signals.tokens
            for i, token, q in zip(active, tokens, probs, strict=True):
                trees[i].add(token, len(trees[i]) - 1, TokenOrigin.DRAFT, q)
                trees[i].draft_forwards += 1
                trees[i].draft_tokens += 1
                feed[i] = [token]
            open_ended = [
                n for n, end in enumerate(ends) if not end and tokens[n] not in self.eos_token_ids
            ]
            shown = list(range(len(active))) if self.policy.learns else open_ended
            if not shown:
                break
            asking = perf_counter()
            answers = zip(shown, self.policy.go_on(signals.only(shown)), strict=True)
            self.clock.asked(asking)
            active = [active[n] for n, go in answers if go and n in open_ended]
        return trees

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.context.keep(sequence, outcome)
        _report(self.policy, sequence.slot, outcome)

    def _draft(
        self,
        sequences: list[SlotState],
        feed: list[list[int]],
        drafted: list[list[int]],
        reads: Sequence[str],
    ) -> tuple[Signals, list[Tensor | None]]:
        """One forward: the next token of each row after those `drafted` in the round, and the
        distribution that it carries. The signals know the values `reads`."""
        slots = [s.slot for s in sequences]
        output = self.runner.forward(Batch(slots, feed, wanted=[1] * len(feed)))
        returned = perf_counter()
        output = warped(output, sequences, lambda n: [drafted[n]])
        at = Places(
            [s.sampling for s in sequences],
            [s.random for s in sequences],
            [len(s.tokens) + len(tokens) for s, tokens in zip(sequences, drafted, strict=True)],
            output.logits,
            lambda: output.chosen,
        )
        positions = [len(tokens) + 1 for tokens in drafted]
        signals = Signals(
            slots,
            at.draw(),
            positions,
            at.logits,
            at.probs,
            output.hidden,
            source=output if at.probs is None else None,
        )
        signals.fetch(reads)
        self.clock.chose(returned, at.logits)
        return signals, at.carried()


class RecordedChain(Recorded):
    """A recorded draft model's chain."""

    def __init__(self, settings: DraftModelSettings, recorded: RecordedResources) -> None:
        self.policy = recorded.policy(settings.draft, settings.policy)
        self.chains = PolicyChains(settings.draft, self.policy, recorded)

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    def draft(self, sequence: SlotState) -> TokenTree:
        tokens, length, _ = self.chains.draft(sequence)
        tree = TokenTree.chain(tokens[:length], TokenOrigin.DRAFT)
        tree.draft_forwards = tree.draft_tokens = length
        return tree

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        _report(self.policy, sequence.slot, outcome)


def _report(policy: LengthPolicy, slot: int, outcome: Outcome) -> None:
    """Report a chain's outcome to its length policy."""
    if drafted := len(outcome.tree):
        calls = outcome.tree.draft_forwards
        useful = outcome.useful(drafted) if policy.reads_rejected else None
        policy.observe(slot, PolicyOutcome(drafted, outcome.accepted, calls, useful=useful))
