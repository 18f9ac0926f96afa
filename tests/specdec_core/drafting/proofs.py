"""Prompts and sequences that the tests of drafters share, and what every lossless drafter shows."""

from collections.abc import Sequence
from typing import NamedTuple

from specdec_core.config import Sampling
from specdec_core.drafting.drafter import Drafter, Lookup, LookupResult, SlotState
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.statistics import Generation
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.kinds import configured

# Loops and repeats, so that lookups find something; of different lengths, the last of one token.
PROMPTS = [
    tuple([7, 8, 9, 10, 11] * n) + tuple(range(20, 20 + n)) + (7, 8) for n in (1, 3, 2, 5)
] + [(5,)]
# Of different lengths, without repeats.
COUNTING = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]
_alone: dict[tuple[int, Sampling], list[list[int]]] = {}


def requests(
    new_tokens: int = 40, prompts: Sequence[tuple[int, ...]] = tuple(PROMPTS)
) -> list[Request]:
    return [
        Request(str(i), prompt, new_tokens, seed=i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


def generate(
    pair: Pair, drafter: object, slots: int = 1, sampling: Sampling | None = None
) -> list[Generation]:
    """The generations of the requests above with this drafter."""
    return Engine(pair, configured(drafter, sampling), slots).generate(requests())


class Proposal(NamedTuple):
    """A tree of candidates, and what it was proposed for: the text, the tokens that are still
    wanted, and the number of requests that decode beside it."""

    text: list[int]
    room: int
    batch: int
    tree: TokenTree


def proposals(drafter: Drafter) -> list[Proposal]:
    """All trees that `drafter` proposes from now on."""
    propose, seen = drafter.propose, []

    def watched(sequences: Sequence[SlotState]) -> list[TokenTree]:
        trees = propose(sequences)
        seen.extend(
            Proposal(list(own.tokens), own.room, own.batch, tree)
            for own, tree in zip(sequences, trees, strict=True)
        )
        return trees

    drafter.propose = watched
    return seen


def proposed(
    pair: Pair,
    drafter: object,
    slots: int = 3,
    sampling: Sampling | None = None,
    new_tokens: int = 24,
) -> list[Proposal]:
    """All trees that a drafter proposes while it decodes prompts without repeats."""
    engine = Engine(pair, configured(drafter, sampling), slots)
    seen = proposals(engine.drafter)
    engine.generate(requests(new_tokens, COUNTING))
    return seen


def assert_the_targets_own(
    pair: Pair, drafter: object, sampling: Sampling | None = None, slots: int = 3
) -> list[Generation]:
    """Decode a ragged batch in slots that requests enter and leave at different times, with an
    output that no drafter may change; returns the generations."""
    sampling = sampling or Sampling()
    key = id(pair), sampling
    if key not in _alone:
        _alone[key] = [g.tokens for g in generate(pair, None, 1, sampling)]
    generations = generate(pair, drafter, slots, sampling)
    assert [g.tokens for g in generations] == _alone[key]
    accepted = sum(r.accepted for g in generations for r in g.rounds)
    assert accepted > 0, "nothing was ever accepted, so nothing was shown"
    return generations


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
