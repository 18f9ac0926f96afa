"""A draft model that follows the texts of the slots.

Between rounds the cached tokens of a slot are a prefix of its committed text, whichever drafter
proposed: drafters that share a draft model share its runner. The engine has it read prompts, after
the target; a lazy runner reads a text only when a token is drafted after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from specdec_core.drafting.drafter import Outcome, SlotState
from specdec_core.models.runner import ModelRunner

# With more tokens to read than this, the draft model reads them without computing logits.
_CATCH_UP = 16


class DraftContext:
    """Keeps the cache of `runner` in step with what is committed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def room(self, sequence: SlotState) -> int:
        """The depth that the draft model's tree may have: within the sequence's room, as far as the
        draft model can read the text and the candidates but for the last level."""
        text = len(sequence.tokens) + bool(sequence.target_start)
        return max(min(sequence.room, self.runner.max_length - text + 1), 0)

    def pending(self, sequence: SlotState) -> list[int]:
        """Committed tokens that the draft model has not read, at least the last one."""
        slot, length = sequence.slot, self.runner.lengths[sequence.slot]
        if len(sequence.tokens) - length > _CATCH_UP:
            self.runner.prefill([slot], [sequence.tokens[length:-1]])
            length = self.runner.lengths[slot]
        return sequence.tokens[length:]

    def keep(
        self, sequence: SlotState, outcome: Outcome, cached: Mapping[int, int] | None = None
    ) -> None:
        """Keep the accepted tokens of the draft in the cache; nothing is computed again.

        `cached` gives the cache offset from the round's text of each node that the draft model has
        read; unset, the nodes are a chain in their order.
        """
        runner, slot = self.runner, sequence.slot
        added = outcome.accepted + (0 if sequence.target_start else 1)  # and the target's own token
        text = len(sequence.tokens) - added  # length before the round
        read = runner.lengths[slot] - text
        if read <= 0:
            return
        if cached is None:
            runner.truncate(slot, text + min(read, outcome.accepted))
            return
        kept = []
        for node in outcome.path:
            if node not in cached:
                break
            kept.append(cached[node])
        runner.keep(slot, text, kept)
