"""A datastore finds what a naive search finds; it is written whole, and refused where it does not
fit."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.datastores.card import CARD, SUFFIXES, TOKENS
from specdec_core.drafting.datastores.datastore import Datastore, check_datastores, open_datastore
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.retrieval import RetrievalSettings
from specdec_core.models.fingerprints import tokenizer_digest
from specdec_core.training.datastores.build import suffix_array, write_datastore
from tests.conftest import tiny_tokenizer


def word_tokenizer(size):
    words = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words)


SMALL, LARGE = word_tokenizer(4), word_tokenizer(70_000)  # tokens of two bytes, and of four
Documents = list[list[int]]
DEPTH = 6


def build(documents, tokenizer):
    with TemporaryDirectory() as folder:
        write_datastore(documents, ["test"], tokenizer, Path(folder) / "store")
        store = open_datastore(Path(folder) / "store", tokenizer_digest(tokenizer))
        return Datastore(store.card, *map(np.array, (store.tokens, store.suffixes, store._starts)))


def followed(documents, phrase):
    """What follows `phrase` where something does, up to the document's end or DEPTH tokens; sorted,
    an end being larger than every token."""
    size = len(phrase)
    found = (
        tuple(text[start + size :][:DEPTH])
        for text in documents
        for start in range(len(text) - size)
        if text[start : start + size] == list(phrase)
    )
    return sorted(found, key=lambda tokens: (*tokens, 10**6))


def check(store, documents, text, least, most):
    matches = store.longest(text, least, most)
    sizes = range(min(most, len(text)), least - 1, -1)
    size = next((n for n in sizes if followed(documents, text[len(text) - n :])), 0)
    assert matches.length == size
    expected = followed(documents, text[len(text) - size :]) if size else []
    assert len(matches) == len(expected)
    places = store.continuations(matches, depth=DEPTH, most=100)
    ends = [store.card.separator]
    rows = [list(row) for row in zip(*places, strict=True)]
    assert [tuple(row[: [*row, *ends].index(ends[0])]) for row in rows] == expected


few_tokens = st.integers(0, 3)
documents = st.lists(st.lists(few_tokens, min_size=1, max_size=12), min_size=1, max_size=5)
queries = st.lists(st.integers(0, 5), max_size=8)  # some tokens are beyond the vocabulary
bounds = st.tuples(st.integers(1, 3), st.integers(3, 9))


@given(documents, queries, bounds)
def test_lookups_are_those_of_a_naive_search(documents, text, bounds):
    check(build(documents, SMALL), documents, text, *bounds)


def test_a_vocabulary_of_more_than_two_bytes_is_searched_alike():
    generator = np.random.default_rng(0)
    rare = [3, 255, 256, 65_535, 65_536, 69_999]  # bytes in another order would sort otherwise
    documents = [generator.choice(rare, 40).tolist() for _ in range(5)]
    store = build(documents, LARGE)
    for start in range(0, 30, 2):
        check(store, documents, documents[0][start : start + 6], 1, 4)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60))
def test_suffixes_are_sorted(tokens):
    found = suffix_array(np.array(tokens, dtype=">u2"))
    assert found.tolist() == sorted(range(len(tokens)), key=lambda start: tokens[start:])


def test_many_matches_are_read_evenly():
    documents = [[1, 2]] * 30 + [[1, 3]] * 90
    store = build(documents, SMALL)
    matches = store.longest([0, 1], 1, 4)
    assert (matches.length, len(matches)) == (1, 120)
    [tokens] = store.continuations(matches, depth=1, most=40)
    assert (tokens.count(2), tokens.count(3)) == (10, 30)


def test_a_datastore_says_what_is_in_it(tmp_path):
    card = write_datastore([[1, 2], [], [3]], ["a", "b"], SMALL, tmp_path / "store")
    assert (card.documents, card.tokens, card.sources) == (2, 3, ("a", "b"))
    assert open_datastore(tmp_path / "store").card == card


def test_interrupted_building_leaves_what_was_there(tmp_path):
    folder = tmp_path / "store"
    write_datastore([[1, 2]], ["old"], SMALL, folder)

    def interrupted():
        yield [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_datastore(interrupted(), ["new"], SMALL, folder)
    assert open_datastore(folder).card.sources == ("old",)
    write_datastore([[3]], ["new"], SMALL, folder)
    assert open_datastore(folder).card.sources == ("new",)
    assert list(tmp_path.iterdir()) == [folder]


def refused(name, tokenizer=None):
    with pytest.raises(UserError) as error:
        open_datastore(name, tokenizer)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_datastore_of_a_search_is_checked_before_it_begins(tmp_path):
    known, missing = tmp_path / "known", tmp_path / "missing"
    write_datastore([[1, 2, 3]], ["test"], SMALL, known)

    def search(folder):
        inner = HybridSettings(lookup=RetrievalSettings(datastore=str(folder)))
        return [AUTOREGRESSIVE, Configuration(drafter=HybridSettings(otherwise=inner))]

    check_datastores(search(known), SMALL)
    with pytest.raises(UserError, match="another tokenizer"):
        check_datastores(search(known), LARGE)
    with pytest.raises(UserError, match="no datastore"):
        check_datastores([*search(known), *search(missing)], SMALL)


def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    assert "`specdec datastore` builds one" in refused("mine")
    folder = tmp_path / "datastores" / "mine"
    write_datastore([[1, 2, 3]], ["test"], SMALL, folder)
    assert "there are mine" in refused("yours")
    assert "another tokenizer" in refused("mine", tokenizer_digest(tiny_tokenizer()))
    with pytest.raises(UserError, match="empty datastore"):
        write_datastore([[], []], ["nothing"], SMALL, tmp_path / "datastores" / "empty")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["mine"]

    whole = (folder / SUFFIXES).read_bytes()
    (folder / SUFFIXES).write_bytes(whole[:-3])
    assert "build it again" in refused("mine")
    np.save(folder / SUFFIXES, np.arange(2, dtype=np.int32))
    assert "do not belong" in refused("mine")
    (folder / SUFFIXES).unlink()
    assert "build it again" in refused("mine")
    (folder / SUFFIXES).write_bytes(whole)
    assert open_datastore("mine").card.tokens == 3
    (folder / CARD).write_text("{}")
    assert "not a datastore's card" in refused("mine")
    (folder / TOKENS).unlink()
    (folder / CARD).unlink()
    assert "no datastore" in refused(folder)
