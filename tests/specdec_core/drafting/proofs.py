"""What every lossless drafter must show: the greedy text is the target's own, and samples have the
target's joint distribution."""

from __future__ import annotations

from collections.abc import Sequence

from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import exact_distribution, sample_counts, toy_pair
from specdec_core.config import AUTOREGRESSIVE, Configuration, DrafterSettings, Sampling
from specdec_core.drafting.drafter import Lookup, LookupResult, SlotState
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.statistics import Generation
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.fits import alike_behind_the_first

# Loops and repeats, so that lookups find something; of different lengths, the last of one token.
PROMPTS = [
    tuple([7, 8, 9, 10, 11] * n) + tuple(range(20, 20 + n)) + (7, 8) for n in (1, 3, 2, 5)
] + [(5,)]


def requests(new_tokens: int = 40) -> list[Request]:
    return [
        Request(str(i), prompt, new_tokens, seed=i, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]


def assert_greedy_identity(pair: Pair, drafter: DrafterSettings) -> list[Generation]:
    """Decode a ragged batch, one at a time and in three slots, which requests enter and leave at
    different times; returns the last generations."""
    expected = [g.tokens for g in Engine(pair, AUTOREGRESSIVE).generate(requests())]
    for slots in (1, 3):
        engine = Engine(pair, Configuration(drafter=drafter), slots)
        generations = engine.generate(requests())
        assert [g.tokens for g in generations] == expected, f"{slots} slots"
    accepted = sum(r.accepted for g in generations for r in g.rounds)
    assert accepted > 0, "nothing was ever accepted, so nothing was shown"
    return generations


def assert_exact(drafter: DrafterSettings, sampling: Sampling, samples: int = 4_000) -> None:
    """Compare samples of all texts of four tokens with their probabilities: the first has no
    candidates. 4,000 find, 99 times in 100, what differs by a χ² divergence of 0.034, a total
    variation of some 0.09."""
    pair = toy_pair()
    configuration = Configuration(drafter=drafter, sampling=sampling)
    counts = sample_counts(pair, configuration, samples, length=4)
    expected = exact_distribution(pair, sampling, 4)
    assert goodness_of_fit(*alike_behind_the_first(counts, expected)) > 1e-3


def sequence(tokens: Sequence[int], slot: int = 0, room: int = 50) -> SlotState:
    return SlotState(slot, list(tokens), Sampling(), RandomStream(0, 320), room)


def found_in(lookup: Lookup, text: Sequence[int], drafted: Sequence[int] = ()) -> LookupResult:
    """What a request with the prompt `text` finds at once."""
    own = sequence(text)
    lookup.open([own])
    return lookup.find(own, drafted, own.room)


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((token,) if parent == ROOT else (*found[parent], token))
    return found
