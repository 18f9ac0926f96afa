"""A round costs what attention costs: nothing copies the cache, and memory is slots × positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.cache import SlotLayer
from specdec_core.models.eager import EagerRunner
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch
from specdec_core.studies.long_context import CANDIDATES, measure_contexts, room_for
from tests.specdec_core.studies.steps import Steps

LAYERS, HEADS, SIZE = 2, 4, 16
NEAR, FAR = 64, 448


class Allocations(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation makes, temporary or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        held = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in held:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=HEADS * SIZE, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def allocated(model: LlamaForCausalLM, context: int, rows: int, width: int) -> int:
    """Bytes that a forward behind `context` tokens makes, the texts of the rows being ragged."""
    runner = EagerRunner(model, rows, FAR + 32)
    runner.prefill(range(rows), [[1] * (context - row) for row in range(rows)])
    with Allocations() as made:
        runner.forward(Batch(range(rows), [[1] * width] * rows))
    return made.bytes


def cached(context: int, rows: int) -> int:
    """Bytes of keys and values."""
    return 2 * LAYERS * rows * HEADS * context * SIZE * 4


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 8])
def test_a_forward_makes_no_copy_of_the_cache(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, rows: int, width: int
) -> None:
    """Of neighbouring rows, each head with keys of its own: of others the eager runner gathers what
    it needs."""
    made = allocated(model, FAR, rows, width)
    copy = cached(FAR - NEAR, rows)
    assert made - allocated(model, NEAR, rows, width) < 0.1 * copy  # masks and positions

    # The same with a cache that is put together anew, as a growing one is: it would be seen.
    update = SlotLayer.update

    def concatenated(self: SlotLayer, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        found = update(self, *args, **kwargs)
        return tuple(torch.cat([t[:, :, :-1], t[:, :, -1:]], dim=2) for t in found)

    monkeypatch.setattr(SlotLayer, "update", concatenated)
    assert allocated(model, FAR, rows, width) - made >= copy


def test_a_round_makes_no_copy_of_the_caches(model: LlamaForCausalLM, tiny_pair: Pair) -> None:
    """A whole step of the engine, drafting included."""
    runner = tiny_pair.spec.runner.model_copy(update={"max_length": FAR + 64})
    spec = tiny_pair.spec.model_copy(update={"runner": runner})
    pair = Pair(spec, tiny_pair.tokenizer, model, {"draft": model})
    policy = FixedSettings(max_tokens=4)
    engine = Engine(pair, Configuration(drafter=DraftModelSettings(policy=policy)))
    made = {}
    for context in (NEAR, FAR):
        engine.add(Request("", (1,) * context, 40, ignore_eos=True))
        for _ in range(2):  # the target reads the prompt, then the draft does
            engine.step()
        with Allocations() as step:
            engine.step()
        made[context] = step.bytes
        engine.cancel("")
    forwards = 5
    assert made[FAR] - made[NEAR] < 0.1 * forwards * cached(FAR - NEAR, 1)


def test_memory_is_slots_times_positions_and_does_not_grow(model: LlamaForCausalLM) -> None:
    runner = EagerRunner(model, slots=3, max_length=300)
    runner.prefill([0, 1, 2], [[1], [2, 3], [4]])
    stores = [store for layer in runner.cache.layers for store in (layer.keys, layer.values)]
    held = [store.data_ptr() for store in stores]
    expected = cached(runner.cache.positions, 3)
    for _ in range(200):
        runner.forward(Batch([0, 1, 2], [[5, 6]] * 3))
        for row in range(3):
            runner.truncate(row, runner.lengths[row] - 1)
        now = [store for layer in runner.cache.layers for store in (layer.keys, layer.values)]
        assert [store.data_ptr() for store in now] == held
        assert sum(store.untyped_storage().nbytes() for store in now) == expected


def test_every_context_is_measured_and_the_rest_is_what_the_forwards_leave(
    tiny_pair: Pair,
) -> None:
    steps = Steps()
    table = measure_contexts(tiny_pair, [5, 6, 7], (64, 16), repeats=1, observer=steps)
    assert list(table["context"]) == [16, 64]
    parts = ["target_1", "target_8", "draft", "autoregressive_round", "round"]
    assert (table[parts] > 0).all(axis=None)
    forwards = table["target_8"] + CANDIDATES * table["draft"]
    torch.testing.assert_close((forwards + table["rest"]).to_list(), table["round"].to_list())
    assert (steps.expected, steps.done) == (4, 4)


def test_contexts_that_do_not_fit_are_one_line(tiny_pair: Pair) -> None:
    with pytest.raises(UserError, match="more than the 256"):
        measure_contexts(tiny_pair, [1], (64, 256))
    assert room_for((64, 200)) <= 256
