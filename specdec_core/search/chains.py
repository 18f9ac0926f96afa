"""The rounds of an engine that drafts whole chains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdec_core.config import Configuration
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.servers.chains import fixed_chain


def whole_chains(option: Configuration, rounds: ReplayedRounds) -> ReplayedRounds:
    """The rounds of an engine that always drafts the full chain: where fewer tokens are left, and
    after the prompt, when nothing is verified yet. The rounds of other drafters are unchanged."""
    chain = fixed_chain(option.drafter)
    if chain is None:
        return rounds
    drafted = np.full_like(rounds.drafted, chain.spans[0].tokens)
    return replace(
        rounds,
        drafted=np.where(rounds.position == 0, 0, drafted),
        draft_forwards=drafted,
        draft_tokens=drafted,
        depth=drafted,
    )
