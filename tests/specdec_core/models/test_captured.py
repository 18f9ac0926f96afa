"""Forwards padded to fixed sizes, as CUDA graphs need them, give the eager logits.

Without a GPU what a graph would replay is run at once, on the same padded inputs.
"""

from functools import cache
from itertools import count

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from specdec_core.models.compiled import CompiledRunner
from specdec_core.models.compiled import captured as packed
from specdec_core.models.compiled.failures import CannotCompile
from specdec_core.models.compiled.step import example
from specdec_core.models.eager import EagerRunner
from specdec_core.models.runner import Batch
from tests.conftest import tiny_llama

pytestmark = pytest.mark.filterwarnings("error:running without")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
POSITIONS = 200
PROMPTS = [list(range(5, 5 + count)) for count in (7, 70, 23)]
TREE = [-1, 0, 0, 1, 2, 3, 3]


class AtOnce:
    """In the place of captured graphs: the step itself."""

    def __init__(self, device):
        pass

    def run(self, step, flat, sizes):
        return step(flat, sizes)


def two_kinds_of_layers():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, **kinds)).eval()


@cache
def model_of(kind):
    """A Llama, or a model with two kinds of masks."""
    if kind != "windows":
        return tiny_llama(0, hidden=32, layers=2, vocab=320).to(DEVICE)
    return two_kinds_of_layers().to(DEVICE)


NEEDS_GPU = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture(params=["packed", "windows", pytest.param("fused", marks=[NEEDS_GPU])])
def runners(request, monkeypatch):
    """An eager runner, and one of captured graphs: of kernels as they are or, which takes long to
    compile, fused."""
    model = model_of(request.param)
    if request.param != "fused":
        monkeypatch.setattr(packed, "fused", lambda step, *_: step)
    if not GPU:
        monkeypatch.setattr(packed, "Captured", AtOnce)
    below = EagerRunner(model, 3, POSITIONS, compact=True, pooled=True, cache_tokens=1)
    captured = CompiledRunner(below, "weights")
    assert captured.mixes
    return [EagerRunner(model, 3, POSITIONS, packs=False), captured]


def assert_alike(runners, *arguments):
    expected, found = (runner.forward(Batch(*arguments)) for runner in runners)
    assert found.choices() == expected.choices()
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=0)
    if expected.hidden is not None:
        torch.testing.assert_close(found.hidden, expected.hidden, atol=2e-5, rtol=0)


def test_rows_prompts_and_trees_of_any_size(runners):
    for runner in runners:
        runner.watch_hidden(True)
        runner.prefill([0, 1, 2], PROMPTS)
    assert_alike(runners, [2, 0], [[1, 2, 3], [4, 5]])
    assert_alike(runners, [0, 1, 2], [[7, 8, 9, 10, 11, 12, 13]] * 3, [TREE] * 3)
    for runner in runners:
        for row in range(3):
            runner.keep(row, runner.lengths[row] - len(TREE), [0, 2, 4])
    assert_alike(runners, [1], [[40]])
    # A piece of a prompt, a tree, and the last of a chain.
    assert_alike(
        runners,
        [2, 1, 0],
        [list(range(100)), [7, 8, 9], [5, 6]],
        [None, [-1, 0, 0], None],
        [0, 3, 1],
    )
    assert_alike(runners, [0, 1, 2], [[3], [4], [5]])
    assert runners[0].lengths == runners[1].lengths


def test_an_output_stays_what_it_was_after_further_forwards(runners):
    _, captured = runners
    captured.prefill([0, 1], PROMPTS[:2])
    first = captured.forward(Batch([0], [[9]]))
    logits = first.logits.clone()
    captured.forward(Batch([1], [[10]]))
    assert torch.equal(first.logits, logits)


def test_padding_never_touches_a_text_that_fills_its_slot(runners):
    text = [3 + n % 300 for n in range(runners[0].max_length)]
    for runner in runners:
        runner.prefill([0], [text])
    for token in (5, 6, 7):
        assert_alike(runners, [0, 2], [[token], [token, 8, 9]])
    room = runners[1].cache.positions - runners[1].lengths[0] + 1
    lengths = list(runners[1].lengths)
    with pytest.raises(ValueError, match="do not fit"):
        runners[1].forward(Batch([0], [[1] * room]))
    assert runners[1].lengths == lengths


def test_a_pool_may_hold_more_tokens_than_any_row():
    stores = [torch.zeros(1, 2, 64, 8)]
    _, shapes = example(stores, stores, [], 1, torch.zeros((2, 2), dtype=torch.int32))
    keys, values = shapes[4:6]
    assert keys[0][2].max == values[0][2].max >= 1 << 24


def test_a_process_never_gives_up_graphs_of_a_shared_model_alone(monkeypatch):
    """The others would wait for what it exchanges."""
    calls = count(1)

    class FailsOnce(AtOnce):
        fails_at = 3  # of the first graphs

        def run(self, *arguments):
            if next(calls) == self.fails_at:
                raise CannotCompile("no memory left")
            return super().run(*arguments)

    monkeypatch.setattr(packed, "fused", lambda step, *_: step)
    monkeypatch.setattr(packed, "Captured", FailsOnce)
    model = tiny_llama(0, hidden=32, layers=2, vocab=320)
    votes: list[bool] = []

    def agree(own):
        votes.append(own)
        return own

    def opened():
        below = EagerRunner(
            model, 3, POSITIONS, compact=True, pooled=True, cache_tokens=1, agree=agree
        )
        return CompiledRunner(below, "weights")

    with pytest.raises(CannotCompile, match="no memory left"):
        opened()
    runner = opened()
    assert all(votes)
    FailsOnce.fails_at = next(calls) + 1
    with pytest.raises(CannotCompile, match="no memory left"):
        runner.forward(Batch([0], [[5]]))


@NEEDS_GPU
def test_a_model_that_no_graph_can_hold_is_one_warning_and_the_eager_logits():
    model = tiny_llama(0, hidden=32, layers=2, vocab=320).to(DEVICE)
    inner = model.model.layers[0].mlp.forward

    def waits(states):
        assert states.sum().item() < float("inf")
        return inner(states)

    model.model.layers[0].mlp.forward = waits
    with pytest.warns(UserWarning, match="running without compiled graphs"):
        captured = CompiledRunner(EagerRunner(model, 3, POSITIONS), "weights")
    runners = [EagerRunner(model, 3, POSITIONS, packs=False), captured]
    for runner in runners:
        runner.prefill([0], [PROMPTS[0]])
    assert_alike(runners, [0], [[3, 4]])
