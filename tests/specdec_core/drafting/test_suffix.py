"""Lookups by suffix and by n-gram copy what followed earlier occurrences."""

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdec_core.drafting.automaton import ROOT, SuffixAutomaton
from specdec_core.drafting.prompt_lookup import PromptLookupDrafter, PromptLookupSettings
from specdec_core.drafting.suffix import EarlierOutputs, SuffixDrafter, SuffixSettings
from specdec_core.servers.vllm.process import VENV, inherited_environment
from tests.commands import ran
from tests.peers import vllm_installed
from tests.specdec_core.drafting.proofs import found_in, paths, sequence

FEW = st.integers(0, 2)
EARLIEST = PromptLookupSettings(max_ngram=3, max_tokens=4, occurrence="earliest")
texts = st.lists(st.lists(FEW, max_size=14), max_size=4)


def places(texts, phrase):
    """Where `phrase` ends: text and position, in the order in which they were read."""
    size = len(phrase)
    return [
        (number, start + size)
        for number, text in enumerate(texts)
        for start in range(len(text) - size + 1)
        if text[start : start + size] == list(phrase)
    ]


def followers(texts, phrase):
    """The tokens behind `phrase`, in that order."""
    return [texts[n][end] for n, end in places(texts, phrase) if end < len(texts[n])]


def longest(texts, end):
    """Of the suffixes of `end` that something follows, the longest one's length; by trying all."""
    sizes = range(len(end), 0, -1)
    return next((n for n in sizes if followers(texts, end[len(end) - n :])), 0)


def most_frequent(texts, phrase, count):
    """What most often follows, token by token; of equals what followed last."""
    tokens: list[int] = []
    while len(tokens) < count and (found := followers(texts, [*phrase, *tokens])):
        last = {token: place for place, token in enumerate(found)}
        tokens.append(max(last, key=lambda token: (found.count(token), last[token])))
    return tokens


@given(texts, st.lists(st.integers(0, 3), max_size=8))
def test_the_automaton_knows_every_phrase_its_count_and_its_followers(texts, query):
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    assert automaton.tokens == sum(map(len, texts))
    assert len(automaton.link) <= 2 * automaton.tokens + 1
    state, matched = automaton.walk(ROOT, 0, query)
    sizes = range(len(query), 0, -1)
    known = next((n for n in sizes if places(texts, query[len(query) - n :])), 0)
    assert matched == known
    if matched:
        assert automaton.count[state] == len(places(texts, query[len(query) - matched :]))
    state, matched = automaton.followed(state, matched, [])
    assert matched == longest(texts, query)
    phrase = query[len(query) - matched :]
    assert automaton.continuation(state, 4) == most_frequent(texts, phrase, 4)


@given(st.lists(FEW, min_size=1, max_size=30), st.lists(FEW, max_size=4))
def test_found_is_the_longest_suffix_that_was_there_before(text, drafted):
    lookup = SuffixDrafter(SuffixSettings(max_tokens=5, per_match=0))
    found = found_in(lookup, text, drafted)
    end = [*text, *drafted]
    assert found.match == longest([text], end)
    phrase = end[len(end) - found.match :]
    expected = most_frequent([text], phrase, 5) if found.match else []
    assert found.tree.tokens == expected
    assert found.tree.parents == list(range(-1, len(found.tree) - 1))


@given(st.lists(FEW, min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 5))
def test_a_tree_holds_the_likeliest_continuations(text, nodes, room):
    lookup = SuffixDrafter(SuffixSettings(max_tokens=nodes, per_match=0, tree=True))
    own = sequence(text, room=room)
    lookup.open([own])
    found = lookup.find(own, (), room)
    assert found.match == longest([text], text)
    phrase = text[len(text) - found.match :] if found.match else None
    likelihoods = {(): 1.0}
    level = [()] if phrase else []
    for _ in range(room):
        longer = []
        for path in level:
            behind = followers([text], [*phrase, *path])
            for token in set(behind):
                share = behind.count(token) / len(behind)
                likelihoods[(*path, token)] = likelihoods[path] * share
                longer.append((*path, token))
        level = longer
    del likelihoods[()]
    chosen = paths(found.tree)
    assert len(set(chosen)) == len(chosen) == min(nodes, len(likelihoods))
    shares = [likelihoods[path] for path in chosen]
    assert shares == pytest.approx(sorted(likelihoods.values(), reverse=True)[: len(chosen)])


@pytest.mark.parametrize(
    "make",
    [lambda: SuffixDrafter(SuffixSettings(per_match=0)), lambda: PromptLookupDrafter(EARLIEST)],
    ids=["suffix", "prompt lookup"],
)
@given(st.lists(st.lists(FEW, min_size=1, max_size=12), min_size=1, max_size=5))
def test_a_text_read_bit_by_bit_is_the_text_read_at_once(make, parts):
    growing, own = make(), sequence(parts[0])
    growing.open([own])
    for part in parts[1:]:
        growing.find(own, part[:1], own.room)  # drafted text leaves no trace
        own.tokens += part
    assert growing.find(own, (), own.room) == found_in(make(), own.tokens)


@given(
    st.lists(st.lists(FEW, min_size=1, max_size=10), max_size=4),
    st.lists(FEW, min_size=1, max_size=10),
    st.lists(FEW, max_size=6),
)
def test_outputs_of_earlier_requests_are_found_but_not_their_prompts(outputs, text, later):
    lookup = SuffixDrafter(SuffixSettings(per_match=0, memory="all"))
    beside = sequence(text, slot=1)
    lookup.open([beside])
    for output in outputs:
        earlier = sequence([9, 9, 9, *text])
        lookup.open([earlier])
        earlier.tokens += output
        lookup.find(beside, (), 5)  # it had begun before the other requests ended
        lookup.close(earlier)
    beside.tokens += later
    found = lookup.find(beside, (), beside.room)
    end = [*text, *later]
    in_own, in_outputs = longest([end], end), longest(outputs, end)
    assert found.match == max(in_own, in_outputs)
    phrase = end[len(end) - found.match :]
    where = [end] if in_own == found.match else outputs
    assert found.tree.tokens == (most_frequent(where, phrase, 10) if found.match else [])


def test_only_the_latest_outputs_are_remembered():
    earlier = EarlierOutputs(most=100)
    for number in range(40):
        earlier.learn([number] * 10)
        assert earlier.texts.tokens <= 100
    assert 39 in earlier.texts.follows[ROOT]
    assert 20 not in earlier.texts.follows[ROOT]


@pytest.mark.parametrize(
    ("per_match", "expected"), [(0.0, 10), (0.3, 1), (1.0, 3), (2.5, 7), (9.0, 10)]
)
def test_candidates_are_bounded_by_what_was_matched(per_match, expected):
    text = [1, 2, 3, *range(10, 30), 1, 2, 3]
    found = found_in(SuffixDrafter(SuffixSettings(per_match=per_match)), text)
    assert found.match == 3
    assert found.tree.tokens == list(range(10, 10 + expected))


def test_too_short_a_match_proposes_nothing():
    lookup = SuffixDrafter(SuffixSettings(min_match=3))
    assert found_in(lookup, [1, 2, 3, 4, 9, 2, 3, 4]).match == 3
    found = found_in(lookup, [1, 2, 3, 4, 9, 3, 4])
    assert (len(found.tree), found.match) == (0, 0)


TWICE = [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2]  # 1 2 is followed by 3 4 and by 6 7


def copied(settings, text):
    return list(found_in(PromptLookupDrafter(settings), text).tree.tokens)


@pytest.mark.parametrize(("occurrence", "expected"), [("latest", [6, 7]), ("earliest", [3, 4])])
def test_of_two_continuations_the_chosen_one_is_copied(occurrence, expected):
    assert copied(PromptLookupSettings(max_tokens=2, occurrence=occurrence), TWICE) == expected


@given(st.lists(FEW, min_size=2, max_size=24))
def test_the_earliest_is_what_transformers_copies(text):
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=EARLIEST.max_tokens,
        max_matching_ngram_size=EARLIEST.max_ngram,
        max_length=100,
    )
    candidates, _ = theirs.get_candidates(torch.tensor([text]))
    assert copied(EARLIEST, text) == candidates[0, len(text) :].tolist()


@vllm_installed
@pytest.mark.parametrize("shortest", [1, 2])
def test_the_earliest_is_what_vllm_copies(shortest):
    settings = EARLIEST.model_copy(update={"min_ngram": shortest})
    chance = random.Random(0)
    texts = [[chance.randrange(3) for _ in range(n % 24 + 2)] for n in range(200)]
    texts.append(TWICE)
    copy = (
        "import json, sys, numpy; from vllm.v1.spec_decode import ngram_proposer as vllm\n"
        "find = vllm._find_longest_matched_ngram_and_propose_tokens\n"
        f"sizes = {settings.min_ngram}, {settings.max_ngram}, 100, {settings.max_tokens}\n"
        "texts = [numpy.array(text, numpy.int32) for text in json.load(sys.stdin)]\n"
        "print(json.dumps([find(text, *sizes).tolist() for text in texts]))"
    )
    options = {"input": json.dumps(texts), "env": inherited_environment()}
    theirs = json.loads(ran(VENV / "bin" / "python", "-c", copy, **options).splitlines()[-1])
    assert theirs[-1] == [3, 4, 5, 1]
    assert [copied(settings, text) for text in texts] == theirs
