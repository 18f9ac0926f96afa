"""Whatever tree is fed, in whatever steps, and whatever path of it is kept: the slot cache holds
what a plain forward of the kept text leaves behind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config

from specdec_core.models.eager import EagerRunner
from specdec_core.models.runner import Batch
from specdec_core.tokens.token_tree import ROOT
from tests.conftest import tiny_llama

VOCABULARY, LENGTH = 64, 48
TOKEN = st.integers(0, VOCABULARY - 1)


def gemma():
    """Layers with windows of 4 tokens, and one without."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def gpt2():
    """Learned positions."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=LENGTH,
        initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


# Models, and ways to run them: rows one by one, packed, by the project's operator, and so in a pool
# of blocks.
RUN = [
    *(("llama", way) for way in ("row by row", "packed", "operator", "pool")),
    *(("gemma", way) for way in ("row by row", "packed", "operator", "pool")),
    ("gpt2", "packed"),
]


@pytest.fixture(scope="module", params=RUN, ids=" ".join)
def run(request):
    """A model, and what opens runners of it."""
    torch.manual_seed(0)
    name, way = request.param
    make = {"gemma": gemma, "gpt2": gpt2}.get(name)
    model = (make() if make else tiny_llama(0, 16, 2, VOCABULARY)).eval()

    def opened(slots):
        runner = EagerRunner(
            model,
            slots,
            LENGTH,
            packs=way != "row by row",
            compact=way in ("operator", "pool"),
            pooled=way == "pool",
            cache_tokens=1,
        )
        assert runner.packs == (way != "row by row")
        return runner

    return model, opened


def held(runner, row, count):
    """The keys and values (tokens, heads, size) of a row in every layer."""
    at, places = runner.cache.at([row] * count, range(count))
    layers = runner.cache.held()
    return [store.tensor[at, :, places] for layer in layers for store in layer.stores]


@st.composite
def slot_round(draw):
    """A slot's text, the tokens and parents of its tree, the path that is kept, and at which nodes
    the tree is cut into the forwards that feed it."""
    text = draw(st.lists(TOKEN, min_size=1, max_size=12))
    size = draw(st.integers(1, 9))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(size)]
    tokens = draw(st.lists(TOKEN, min_size=size, max_size=size))
    node, path = draw(st.integers(ROOT, size - 1)), []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return text, tokens, parents, path, [0, *cuts, size]


@torch.inference_mode()
def plain(model, tokens):
    return model(torch.tensor([tokens])).logits[0, -1]


def ancestors(parents, node):
    above = []
    while node != ROOT:
        above.insert(0, node)
        node = parents[node]
    return above


@settings(max_examples=10)
@given(rounds=st.lists(slot_round(), min_size=1, max_size=3), data=st.data())
def test_the_cache_holds_the_kept_path(run, rounds, data):
    model, opened = run
    runner = opened(4)
    slots = data.draw(st.permutations(range(4)))[: len(rounds)]
    runner.prefill(slots, [text for text, *_ in rounds])
    for step in range(max(len(cuts) for *_, cuts in rounds) - 1):
        fed = [
            (slot, own, own[4][step], own[4][step + 1])
            for slot, own in zip(slots, rounds, strict=True)
            if step + 1 < len(own[4])
        ]
        output = runner.forward(
            Batch(
                [slot for slot, *_ in fed],
                [tokens[first:end] for _, (_, tokens, *_), first, end in fed],
                [parents[:end] for _, (_, _, parents, *_), _, end in fed],
            )
        )
        for row, (_, (text, tokens, parents, *_), first, end) in enumerate(fed):
            node = data.draw(st.integers(first, end - 1))
            path = text + [tokens[n] for n in ancestors(parents, node)]
            expected = plain(model, path)
            torch.testing.assert_close(
                output.of_row(row)[node - first], expected, atol=5e-5, rtol=1e-4
            )
    for slot, (text, tokens, _, path, _) in zip(slots, rounds, strict=True):
        runner.keep(slot, len(text), path)
        kept = text + [tokens[node] for node in path]
        assert runner.lengths[slot] == len(kept)
        fresh = opened(1)
        fresh.prefill([0], [kept])
        both = zip(held(runner, slot, len(kept)), held(fresh, 0, len(kept)), strict=True)
        for store, read in both:
            torch.testing.assert_close(store, read, atol=5e-5, rtol=1e-4)
    follow = data.draw(TOKEN)
    logits = runner.forward(Batch(slots, [[follow]] * len(slots))).logits
    for row, (text, tokens, _, path, _) in enumerate(rounds):
        expected = plain(model, [*text, *(tokens[node] for node in path), follow])
        torch.testing.assert_close(logits[row], expected, atol=5e-5, rtol=1e-4)
