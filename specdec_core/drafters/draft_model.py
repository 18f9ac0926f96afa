"""A small language model drafts a chain, one forward pass a token, until the policy says stop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.drafters.base import Sequencing
from specdec_core.policies import LengthPolicy, Signals
from specdec_core.runner import ModelRunner
from specdec_core.sampling import draw, warp_rows
from specdec_core.stats import Origin
from specdec_core.token_tree import TokenTree

# Further behind than this, the draft model catches up without computing logits.
_CATCH_UP = 16


class DraftModel:
    """Drafts chains from `runner`, whose cached tokens are always a prefix of the slot's text."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: LengthPolicy,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.runner, self.policy = runner, policy
        self.vocab_size, self.eos_token_ids = vocab_size, eos_token_ids

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)
            self.runner.truncate(sequence.slot, 0)
        self.runner.prefill([s.slot for s in sequences], [s.tokens[:-1] for s in sequences])

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        trees = [TokenTree() for _ in sequences]
        limits = [min(s.room, self.policy.limit(s.slot)) for s in sequences]
        active = [i for i, limit in enumerate(limits) if limit > 0]
        feed = {i: self._pending(sequences[i]) for i in active}
        while active:
            rows = [sequences[i].slot for i in active]
            logits = self._next_logits(rows, [feed[i] for i in active])
            tokens, probs = self._choose([sequences[i] for i in active], logits)
            for i, token, q in zip(active, tokens, probs, strict=True):
                trees[i].add(token, len(trees[i]) - 1, Origin.DRAFT, q)
                trees[i].draft_forwards += 1
                feed[i] = [token]
            open_ended = [
                n
                for n, i in enumerate(active)
                if len(trees[i]) < limits[i] and tokens[n] not in self.eos_token_ids
            ]
            active = self._going_on(active, rows, tokens, logits, probs, open_ended)
        return trees

    def observe(self, sequence: Sequencing, tree: TokenTree, accepted: int) -> None:
        # Cached are the text before the round and the drafted tokens but the last one; what was
        # rejected is forgotten. The committed text ends in one token that is not from the tree.
        runner, slot = self.runner, sequence.slot
        before = len(sequence.tokens) - accepted - 1
        runner.truncate(slot, min(runner.lengths[slot], before + accepted))
        if len(tree):
            self.policy.observe(slot, len(tree), accepted)

    def _pending(self, sequence: Sequencing) -> list[int]:
        """Committed tokens that the draft model has not seen."""
        slot, length = sequence.slot, self.runner.lengths[sequence.slot]
        if len(sequence.tokens) - length > _CATCH_UP:
            self.runner.prefill([slot], [sequence.tokens[length:-1]])
            length = self.runner.lengths[slot]
        return sequence.tokens[length:]

    def _next_logits(self, rows: list[int], feed: list[list[int]]) -> Tensor:
        """Logits (rows, vocabulary) behind each row's last fed token."""
        logits = self.runner.forward(rows, feed)
        if logits.shape[1] == 1:
            last = logits[:, 0]
        else:
            last = torch.stack([logits[n, len(own) - 1] for n, own in enumerate(feed)])
        return last[:, : self.vocab_size]

    @staticmethod
    def _choose(
        sequences: list[Sequencing], logits: Tensor
    ) -> tuple[list[int], list[Tensor | None]]:
        """The drafted token of each row and the distribution it was drawn from."""
        probs = warp_rows(logits, [s.sampling for s in sequences])
        sampled = [row for row, q in enumerate(probs) if q is not None]
        tokens = logits.argmax(dim=-1).tolist() if len(sampled) < len(probs) else [0] * len(probs)
        if sampled:
            q = torch.stack([probs[row] for row in sampled])
            uniforms = [sequences[row].random.uniform() for row in sampled]
            for row, token in zip(sampled, draw(q, uniforms), strict=True):
                tokens[row] = token
        return tokens, probs

    def _going_on(
        self,
        active: list[int],
        rows: list[int],
        tokens: list[int],
        logits: Tensor,
        probs: list[Tensor | None],
        open_ended: list[int],
    ) -> list[int]:
        """Of `active`, those that draft another token."""
        if not open_ended:
            return []
        everyone = len(open_ended) == len(active)
        chosen = logits if everyone else logits[open_ended]
        q = [probs[n] for n in open_ended]
        signals = Signals(
            [rows[n] for n in open_ended],
            [tokens[n] for n in open_ended],
            chosen,
            None if any(p is None for p in q) else torch.stack(q),
        )
        answers = self.policy.go_on(signals)
        return [active[n] for n, go in zip(open_ended, answers, strict=True) if go]
