"""A draft model that follows the texts of the slots.

Between rounds the cached tokens of a slot are a prefix of its committed text, whoever drafted:
drafters that share a draft model share its runner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_core.drafting.drafter import Outcome, SlotState
from specdec_core.models.runner import ModelRunner

# Further behind than this, the draft model catches up without computing logits.
_CATCH_UP = 16


class DraftContext:
    """Keeps the cache of `runner` in step with what is committed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def open(self, sequences: Sequence[SlotState]) -> None:
        """Read the texts up to their last token, together. Rows that hold them already are left
        alone; the engine empties a row before a request enters. A lazy runner reads a text when
        it is asked what follows it."""
        if self.runner.lazy:
            return
        held = self.runner.lengths
        behind = [s for s in sequences if held[s.slot] < len(s.tokens) - 1]
        texts = [s.tokens[held[s.slot] : -1] for s in behind]
        self.runner.prefill([s.slot for s in behind], texts)

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
        """Of the drafted tokens keep those that were accepted; nothing is computed again.

        `cached` says which nodes of the tree the draft model has read, and as the how-manieth
        token behind the round's text; unset, the nodes of a chain in their order.
        """
        runner, slot = self.runner, sequence.slot
        own = 0 if sequence.target_start else 1  # the target's own token behind the path
        text = len(sequence.tokens) - outcome.accepted - own  # length before the round
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
