"""The slot cache under trees, rollback and compaction gives the logits of a plain forward."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from specdec_core.models.eager import EagerRunner
from specdec_core.models.runner import Batch
from tests.conftest import tiny_llama

#        0     (after the cached prefix)
#      1   2
#     3 4   5
PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = [11, 12, 13, 14, 15, 16]
PREFIXES = [[3, 4, 5, 6, 7, 8, 9], [20, 21, 22]]


def ancestors(node):
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


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


@pytest.fixture(params=["row by row", "packed", "operator", "pool"])
def opened(request, model):
    """Opens a runner that runs rows one by one, packs them, attends by the project's operator, or
    does so in a pool of blocks."""

    def open_runner(slots):
        way = request.param
        runner = EagerRunner(
            model,
            slots,
            max_length=64,
            packs=way != "row by row",
            compact=way in ("operator", "pool"),
            pooled=way == "pool",
            cache_tokens=1,
        )
        assert runner.packs == (way != "row by row")
        return runner

    return open_runner


def test_rows_in_any_order_and_subset_keep_apart(model, opened):
    runner = opened(4)
    texts = {2: [3, 4, 5], 0: [9, 8, 7, 6], 3: [1, 2]}
    output = runner.forward(Batch(list(texts), list(texts.values())))
    for i, tokens in enumerate(texts.values()):
        expected = plain(model, tokens)
        torch.testing.assert_close(output.of_row(i), expected, atol=2e-5, rtol=0)
    assert runner.lengths == [4, 0, 3, 2]
    with pytest.raises(ValueError, match="cannot keep"):
        runner.truncate(1, 1)


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
        path = text + [TOKENS[i] for i in (ancestors(node) if node >= 0 else [])]
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
