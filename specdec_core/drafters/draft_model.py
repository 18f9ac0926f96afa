"""A small language model drafts a chain, one forward pass a token, until the policy says stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specdec_core.config import DraftModelDrafter
from specdec_core.coupling import choose
from specdec_core.drafters.base import Drafter, Outcome, Resources, Sequencing
from specdec_core.drafters.context import DraftContext
from specdec_core.policies import Signals, build_policy, draft_distributions
from specdec_core.sampling import draw, warp_rows
from specdec_core.stats import Origin
from specdec_core.token_tree import TokenTree


class DraftModel(Drafter):
    """Drafts chains from a draft of the pair."""

    def __init__(self, settings: DraftModelDrafter, resources: Resources) -> None:
        self.runner = resources.draft_runner(settings.draft)
        self.context = DraftContext(self.runner)
        self.policy = build_policy(settings.policy, partial(resources.load_head, settings.draft))
        self.vocab_size, self.eos_token_ids = resources.vocab_size, resources.eos_token_ids
        if self.policy.needs_hidden:
            self.runner.watch_hidden(True)
        self.runner.lazy = self.runner.lazy or self.policy.rests

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)
        self.context.open(sequences)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        trees = [TokenTree() for _ in sequences]
        limits = [min(s.room, self.policy.limit(s.slot, s.batch)) for s in sequences]
        active = [i for i, limit in enumerate(limits) if limit > 0]
        feed = {i: self.context.pending(sequences[i]) for i in active}
        while active:
            rows = [sequences[i].slot for i in active]
            logits, hidden = self._forward(rows, [feed[i] for i in active])
            positions = [len(trees[i]) + 1 for i in active]
            tokens, probs = self._choose([sequences[i] for i in active], positions, logits)
            for i, token, q in zip(active, tokens, probs, strict=True):
                trees[i].add(token, len(trees[i]) - 1, Origin.DRAFT, q)
                trees[i].draft_forwards += 1
                trees[i].draft_tokens += 1
                feed[i] = [token]
            open_ended = [
                n
                for n, i in enumerate(active)
                if len(trees[i]) < limits[i] and tokens[n] not in self.eos_token_ids
            ]
            shown = list(range(len(active))) if self.policy.learns else open_ended
            if not shown:
                break
            signals = _signals(shown, rows, tokens, positions, logits, probs, hidden)
            answers = zip(shown, self.policy.go_on(signals), strict=True)
            active = [active[n] for n, go in answers if go and n in open_ended]
        return trees

    def observe(self, sequence: Sequencing, outcome: Outcome) -> None:
        self.context.keep(sequence, outcome)
        if drafted := len(outcome.tree):
            self.policy.observe(sequence.slot, drafted, outcome.accepted)

    def _forward(self, rows: list[int], feed: list[list[int]]) -> tuple[Tensor, Tensor | None]:
        """Logits (rows, vocabulary) behind each row's last fed token, and what the output layer
        made them from (rows, dimension), where the policy asks for it."""
        logits = self.runner.forward(rows, feed)
        last = [len(own) - 1 for own in feed]
        return _at(logits, last)[:, : self.vocab_size], _at(self.runner.hidden, last)

    def _choose(
        self, sequences: list[Sequencing], positions: list[int], logits: Tensor
    ) -> tuple[list[int], list[Tensor | None]]:
        """The drafted token of each row and the distribution it was drawn from; each is the
        `positions`-th candidate of its round."""
        probs = warp_rows(logits, [s.sampling for s in sequences])
        greedy = any(q is None for q in probs)
        tokens = logits.argmax(dim=-1).tolist() if greedy else [0] * len(probs)
        drawn = []
        for row, (sequence, q) in enumerate(zip(sequences, probs, strict=True)):
            if q is None:
                continue
            if sequence.sampling.coupling == "rejection":
                drawn.append(row)
                continue
            place = len(sequence.tokens) + positions[row] - 1
            [tokens[row]] = choose(q[None], sequence.random.noise, [place], self.vocab_size)
        if drawn:
            q = torch.stack([probs[row] for row in drawn])
            uniforms = [sequences[row].random.uniform() for row in drawn]
            for row, token in zip(drawn, draw(q, uniforms), strict=True):
                tokens[row] = token
        return tokens, probs


def _at(states: Tensor | None, places: list[int]) -> Tensor | None:
    """Row n's entry (rows, …) at its own place of `states` (rows, width, …)."""
    if states is None:
        return None
    if states.shape[1] == 1:
        return states[:, 0]
    return torch.stack([states[row, place] for row, place in enumerate(places)])


def _signals(
    chosen: list[int],
    rows: list[int],
    tokens: list[int],
    positions: list[int],
    logits: Tensor,
    probs: list[Tensor | None],
    hidden: Tensor | None,
) -> Signals:
    """What the policy sees of the `chosen` rows."""
    everyone = len(chosen) == len(rows)
    logits = logits if everyone else logits[chosen]
    return Signals(
        [rows[n] for n in chosen],
        [tokens[n] for n in chosen],
        [positions[n] for n in chosen],
        logits,
        draft_distributions(logits, [probs[n] for n in chosen]),
        hidden if everyone or hidden is None else hidden[chosen],
    )
