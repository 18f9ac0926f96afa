"""A draft model that follows the sequences of the slots.

Between rounds the cached tokens of a slot are a prefix of its committed sequence, whichever drafter
proposed: drafters that share a draft model share its runner. The engine has it read prompts, after
the target; a lazy runner reads a sequence only when a token is drafted after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from specdec_core.drafting.drafter import Outcome, SlotState
from specdec_core.models.runner import ModelRunner

# With more tokens to read than this, the draft model reads them without computing logits.
_CATCH_UP = 16


class DraftContext:
    """Keeps the cache of `runner` in step with what is committed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def room(self, sequence: SlotState, begun: bool = False) -> int:
        """The depth that the draft model's tree may have, below a token of the target's where that
        has `begun` it: within the sequence's room, as far as the draft model can read the sequence
        and the candidates but for the last level."""
        text = len(sequence.tokens) + begun
        return max(min(sequence.room, self.runner.max_length - text + 1), 0)

    def pending(self, sequence: SlotState) -> list[int]:
        """Committed tokens that the draft model has not read, at least the last one."""
        slot, length = sequence.slot, self.runner.length(sequence.slot)
        if len(sequence.tokens) - length > _CATCH_UP:
            self.runner.prefill([slot], [sequence.tokens[length:-1]])
            length = self.runner.length(slot)
        return sequence.tokens[length:]

    def keep(
        self, sequence: SlotState, outcome: Outcome, cached: Mapping[int, int] | range
    ) -> None:
        """Keep the accepted nodes of a tree in the cache; nothing is computed again. `cached` gives
        the cache offset, from the sequence before the round, of each node that was read; of a chain
        it may also give the last node, which is not always read."""
        # The round has added the path and, unless it begins the next tree, the target's own token.
        own = 0 if outcome.tree.begun else 1
        slot, before = sequence.slot, len(sequence.tokens) - outcome.accepted - own
        read = self.runner.length(slot) - before
        if read > 0:
            accepted = takewhile(lambda n: n in cached and cached[n] < read, outcome.path)
            self.runner.keep(slot, before, [cached[node] for node in accepted])
