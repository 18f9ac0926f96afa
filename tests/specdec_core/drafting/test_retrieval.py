"""The retrieval drafter proposes the most frequent continuations in its datastore, as a tree."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.drift.toy_pair import toy_pair
from specdec_core.config import Sampling
from specdec_core.drafting.drafter import Resources
from specdec_core.drafting.retrieval import RetrievalDrafter, RetrievalSettings, most_frequent
from specdec_core.engine import Engine, Request
from specdec_core.training.datastores.build import write_datastore
from tests.specdec_core.drafting.datastores.test_datastore import SMALL
from tests.specdec_core.drafting.proofs import PROMPTS, assert_the_targets_own, found_in, paths
from tests.specdec_core.fits import fit

END = 4  # the separator
continuations = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12
)


def columns(texts, depth):
    """The sorted texts, ended and padded, place by place."""
    rows = sorted([*text, END, *[0] * depth][:depth] for text in texts)
    return [list(place) for place in zip(*rows, strict=True)]


@given(continuations, st.integers(1, 8), st.integers(1, 5))
def test_the_tree_holds_the_most_frequent_branches(texts, nodes, depth):
    tree = most_frequent(columns(texts, depth), nodes, END)
    shares = Counter(tuple(text[:n]) for text in texts for n in range(1, min(len(text), depth) + 1))
    chosen = paths(tree)
    assert len(set(chosen)) == len(chosen) == min(nodes, len(shares))
    counts = [shares[path] for path in chosen]
    assert counts == sorted(shares.values(), reverse=True)[: len(chosen)]


def lookup_in(folder, documents, **settings):
    write_datastore(documents, ["test"], SMALL, folder)
    drafter = RetrievalSettings(datastore=str(folder), **settings)
    return RetrievalDrafter(drafter, Resources(None, None, 5, frozenset()))


def test_the_longest_match_decides(tmp_path):
    documents = [[0, 1, 2, 3]] + [[2, 2, 1]] * 3
    lookup = lookup_in(tmp_path / "store", documents)
    found = found_in(lookup, [3, 1], drafted=[2])
    assert (found.match, paths(found.tree)) == (2, [(3,)])
    found = found_in(lookup, [3, 2])
    assert (found.match, paths(found.tree)[:2]) == (1, [(1,), (2,)])  # by how often


def test_matches_are_bounded_on_both_sides(tmp_path):
    lookup = lookup_in(tmp_path / "store", [[0, 1, 2, 3]], min_match=2, max_match=2)
    assert found_in(lookup, [0, 1, 2]).match == 2
    found = found_in(lookup, [0, 0, 2])
    assert (found.match, len(found.tree)) == (0, 0)


@pytest.fixture(scope="module")
def store(tiny_pair, tmp_path_factory):
    """A datastore of what the target writes, with a wrong turn in it."""
    engine = Engine(tiny_pair)
    written = engine.generate([Request(str(i), p, 60) for i, p in enumerate(PROMPTS)])
    texts = [[*prompt, *g.tokens] for prompt, g in zip(PROMPTS, written, strict=True)]
    wrong = [[*text[:20], 300, *text[21:]] for text in texts]
    folder = tmp_path_factory.mktemp("datastores") / "written"
    write_datastore([*texts, *wrong], ["test"], tiny_pair.tokenizer, folder)
    return str(folder)


def test_greedy_output_is_the_targets_own(tiny_pair, store):
    generations = assert_the_targets_own(tiny_pair, RetrievalSettings(datastore=store))
    rounds = [r for g in generations for r in g.rounds[1:]]  # the first has no candidates
    assert sum(r.generated for r in rounds) / len(rounds) > 4
    assert {o.value for g in generations for o in g.origins} >= {"retrieval"}


def test_samples_have_the_targets_joint_distribution(tmp_path):
    tokenizer = toy_pair().tokenizer
    documents = [[1, 2, 1, a, b, a] for a in range(6) for b in range(0, 6, 2)]
    write_datastore(documents, ["test"], tokenizer, tmp_path / "toy")
    drafter = RetrievalSettings(datastore=str(tmp_path / "toy"), keep=12)
    assert fit(drafter, Sampling(temperature=0.7, top_k=3)) > 1e-3
