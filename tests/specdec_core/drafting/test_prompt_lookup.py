"""Prompt lookup copies after the latest occurrence of an n-gram, or after the earliest as vLLM and
transformers do."""

import json
import random
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdec_core.drafting.prompt_lookup import PromptLookupDrafter, PromptLookupSettings
from specdec_core.servers.vllm.process import VENV, inherited_environment
from tests.specdec_core.drafting.proofs import found_in, sequence

EARLIEST = PromptLookupSettings(max_ngram=3, max_tokens=4, occurrence="earliest")
TWICE = [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2]  # 1 2 is followed by 3 4 and by 6 7
few_tokens = st.integers(0, 2)


def copied(settings, text):
    return list(found_in(PromptLookupDrafter(settings), text).tree.tokens)


@pytest.mark.parametrize(("occurrence", "expected"), [("latest", [6, 7]), ("earliest", [3, 4])])
def test_of_two_continuations_the_chosen_one_is_copied(occurrence, expected):
    assert copied(PromptLookupSettings(max_tokens=2, occurrence=occurrence), TWICE) == expected


@given(st.lists(st.lists(few_tokens, min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_text_read_bit_by_bit_is_the_text_read_at_once(parts):
    growing, own = PromptLookupDrafter(EARLIEST), sequence(parts[0])
    growing.open([own])
    for part in parts[1:]:
        growing.find(own, part[:1], own.room)  # drafted text leaves no trace
        own.tokens += part
    assert growing.find(own, (), own.room) == found_in(PromptLookupDrafter(EARLIEST), own.tokens)


@given(st.lists(few_tokens, min_size=2, max_size=24))
def test_the_earliest_is_what_transformers_copies(text):
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=EARLIEST.max_tokens,
        max_matching_ngram_size=EARLIEST.max_ngram,
        max_length=100,
    )
    candidates, _ = theirs.get_candidates(torch.tensor([text]))
    assert copied(EARLIEST, text) == candidates[0, len(text) :].tolist()


@pytest.mark.skipif(
    not (VENV / "bin" / "python").exists(), reason="vLLM is not installed; `make bench-peers` does"
)
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
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", copy],
        input=json.dumps(texts),
        env=inherited_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert theirs[-1] == [3, 4, 5, 1]
    assert [copied(settings, text) for text in texts] == theirs
