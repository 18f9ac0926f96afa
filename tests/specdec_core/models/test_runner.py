"""The slot cache under trees, rollback and compaction holds and gives what a plain forward does."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config

from specdec_core.models.eager import EagerRunner
from specdec_core.models.runner import Batch
from specdec_core.tokens.token_tree import ROOT
from tests.conftest import tiny_llama

#        0     (after the cached prefix)
#      1   2
#     3 4   5
PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = [11, 12, 13, 14, 15, 16]
PREFIXES = [[3, 4, 5, 6, 7, 8, 9], [20, 21, 22]]


# How a runner runs: rows one by one, packed, by the project's operator, and so in a pool of blocks.
WAYS = ["row by row", "packed", "operator", "pool"]


def runner_of(model, way, slots, length):
    runner = EagerRunner(
        model,
        slots,
        length,
        packs=way != "row by row",
        compact=way in ("operator", "pool"),
        pooled=way == "pool",
        cache_tokens=1,
    )
    assert runner.packs == (way != "row by row")
    return runner


def ancestors(parents, node):
    """The path from the root to a node."""
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


@torch.inference_mode()
def plain(model, tokens):
    return model(torch.tensor([tokens], device=model.device)).logits[0]


@pytest.fixture(scope="module", params=["llama", "gemma3-window"])
def model(request, tiny_pair):
    if request.param == "llama":
        return tiny_pair.target
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=128,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval().to(tiny_pair.target.device)


@pytest.fixture(params=WAYS)
def opened(request, model):
    """Opens a runner that runs in this way."""
    return lambda slots: runner_of(model, request.param, slots, 64)


def test_a_long_prompt_prefilled_in_chunks_equals_one_forward(tiny_pair):
    text = [(7 * i) % 300 for i in range(400)]
    runner = EagerRunner(tiny_pair.target, slots=1, max_length=500)
    runner.prefill_chunk = 128
    runner.prefill([0], [text[:-1]])
    logits = runner.forward(Batch([0], [text[-1:]])).logits
    torch.testing.assert_close(logits[0], plain(tiny_pair.target, text)[-1], atol=1e-4, rtol=0)


def test_only_wanted_logits_are_computed(model, opened):
    runner, computed = opened(2), []
    head = model.get_output_embeddings()
    watch = head.register_forward_pre_hook(lambda _, given: computed.append(given[0].shape[1]))
    text = list(range(30, 45))
    try:
        last = runner.forward(Batch([0], [text], wanted=[1])).logits
        two = runner.forward(Batch([0, 1], [[7, 8, 9], text], wanted=[2, 5]))
        runner.forward(Batch([1], [[5, 6, 7]], wanted=[0]))
    finally:
        watch.remove()
    assert sum(computed) == 1 + 7 + 1  # of none, a model computes one
    torch.testing.assert_close(last, plain(model, text)[-1:], atol=2e-5, rtol=0)
    expected = plain(model, [*text, 7, 8, 9])[-2:]
    torch.testing.assert_close(two.of_row(0), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(two.of_row(1), plain(model, text)[-5:], atol=2e-5, rtol=0)


def test_prompts_trees_and_next_tokens_share_a_forward(model, opened):
    """A chunk of a prompt without logits, a tree after its sequence, and a single token: each row
    gets what it asks for, as if it had been alone."""
    runner = opened(3)
    prompt, text, short = list(range(30, 45)), PREFIXES[0], PREFIXES[1]
    runner.prefill([1, 2], [text[:-1], short[:-1]])
    parents = [-1, *(parent + 1 for parent in PARENTS)]
    tokens = [prompt[:9], [text[-1], *TOKENS], short[-1:]]
    output = runner.forward(Batch([0, 1, 2], tokens, [None, parents, None], [0, 7, 1]))
    assert output.counts == [0, 7, 1]
    assert len(output.logits) == len(output.chosen) == 8
    assert [len(own) for own in output.choices()] == output.counts
    for node in range(-1, len(TOKENS)):
        path = text + [TOKENS[i] for i in ancestors(PARENTS, node)]
        found = output.of_row(1)[node + 1]
        torch.testing.assert_close(found, plain(model, path)[-1], atol=2e-5, rtol=0)
    torch.testing.assert_close(output.of_row(2), plain(model, short)[-1:], atol=2e-5, rtol=0)
    last = runner.forward(Batch([0], [prompt[9:]], wanted=[1])).logits
    torch.testing.assert_close(last, plain(model, prompt)[-1:], atol=2e-5, rtol=0)


def test_a_forward_that_raises_has_appended_nothing(model, opened):
    runner = opened(2)
    runner.prefill([0, 1], PREFIXES)
    with pytest.raises(ValueError, match="do not fit"):
        runner.forward(Batch([0, 1], [[5], [5] * 500]))
    with pytest.raises(ValueError, match="cannot keep"):
        runner.truncate(1, len(PREFIXES[1]) + 1)
    assert runner.lengths == [len(prefix) for prefix in PREFIXES]
    logits = runner.forward(Batch([1], [[30]])).logits
    expected = plain(model, [*PREFIXES[1], 30])[-1:]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


def reads_its_mask(module, args, options):
    return args, {**options, "attention_mask": options["attention_mask"][:, :, :, :]}


@pytest.mark.parametrize("compact", [False, True])
def test_a_model_that_packing_would_change_is_run_row_by_row(compact):
    model = tiny_llama(0, hidden=32, layers=2, vocab=320)
    expected = [plain(model, prefix) for prefix in PREFIXES]
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(reads_its_mask, with_kwargs=True)
    runner = EagerRunner(model, slots=2, max_length=64, compact=compact)
    assert not runner.packs
    output = runner.forward(Batch([0, 1], PREFIXES))
    for row in (0, 1):
        torch.testing.assert_close(output.of_row(row), expected[row], atol=2e-5, rtol=0)


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


RUN = [*product(("llama", "gemma"), WAYS), ("gpt2", "packed")]


@pytest.fixture(scope="module", params=RUN, ids=" ".join)
def run(request):
    """A model, and what opens runners of it."""
    torch.manual_seed(0)
    name, way = request.param
    make = {"gemma": gemma, "gpt2": gpt2}.get(name)
    model = (make() if make else tiny_llama(0, 16, 2, VOCABULARY)).eval()

    return model, lambda slots: runner_of(model, way, slots, LENGTH)


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
    path = ancestors(parents, draw(st.integers(ROOT, size - 1)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return text, tokens, parents, path, [0, *cuts, size]


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
            expected = plain(model, path)[-1]
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
        expected = plain(model, [*text, *(tokens[node] for node in path), follow])[-1]
        torch.testing.assert_close(logits[row], expected, atol=5e-5, rtol=1e-4)
