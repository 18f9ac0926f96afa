"""What another engine drafts beyond this one is counted."""

from __future__ import annotations

import pytest

from specdec_core.config import Configuration, parse
from specdec_core.engine import Engine, Request
from specdec_core.export.nearest import whole_chains
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts

REQUESTS = [Request(str(n), (n, n + 1, n + 2), 12, ignore_eos=True) for n in range(3)]


@pytest.mark.parametrize("tokens", [1, 6])
def test_chains_are_drafted_in_full_behind_prompts_and_at_the_end(
    tiny_pair: Pair, tokens: int
) -> None:
    policy = {"kind": "fixed", "max_tokens": tokens}
    drafter = {"kind": "draft_model", "policy": policy}
    option = parse(Configuration, {"drafter": drafter}, "test")
    counts = Counts.of(Engine(tiny_pair, option).generate(REQUESTS))
    full = whole_chains(option, counts)
    assert full.n_drafted == full.n_draft == tokens * counts.n_target > counts.n_drafted
    assert full.n_discarded == full.n_drafted - counts.n_accepted
    assert (full.n, full.n_target) == (counts.n, counts.n_target)


def test_lookups_find_what_they_find(tiny_pair: Pair) -> None:
    option = parse(Configuration, {"drafter": {"kind": "suffix"}}, "test")
    counts = Counts.of(Engine(tiny_pair, option).generate(REQUESTS))
    assert whole_chains(option, counts) == counts
