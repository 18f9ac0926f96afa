"""What is kept of layers is what transformers calls their hidden states, in any family."""

import weakref

import psutil
import pytest
import torch
import transformers

from specdec_core.base.errors import UserError
from specdec_core.models.compiled import CompiledRunner
from specdec_core.models.eager import EagerRunner
from specdec_core.models.features import LayerInputs
from specdec_core.models.runner import Batch

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "gpt-neox": transformers.GPTNeoXConfig(**SIZES),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4
    ),
}  # fmt: skip
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9]
LAYERS = (0, 2, 3)


@torch.inference_mode()
@pytest.mark.parametrize("operator", [False, True], ids=["torch", "operator"])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_of_the_text_that_was_kept(family, operator):
    torch.manual_seed(0)
    config: transformers.PretrainedConfig = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    runner = EagerRunner(model, 2, 48, compact=operator, features=LAYERS)
    runner.forward(Batch([0, 1], [TEXT[:4], TEXT[2:5]]))
    runner.forward(Batch([0], [[7, *TEXT[4:6]]], [[-1, -1, 1]]))  # a tree; one branch stays
    runner.keep(0, 4, [1, 2])
    runner.forward(Batch([0], [TEXT[6:]]))
    states = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in LAYERS], dim=-1)[0]
    kept = runner.features([0] * len(TEXT), range(len(TEXT)))
    torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)


def test_what_watched_a_model_leaves_nothing_in_it():
    """The model outlives its runners, whose caches would stay on the device with them."""
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]).eval()

    def hooks():
        modules = [*model.modules()]
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)

    def watching():
        runner = EagerRunner(model, 2, 48, compact=False, features=LAYERS)
        runner.watch_hidden(True)
        runner.forward(Batch([0], [TEXT]))
        return runner

    runner, before = watching(), hooks()
    assert before > 0
    gone = weakref.ref(runner)
    del runner
    assert gone() is None
    assert hooks() == 0


def test_a_layer_that_the_model_lacks_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"])
    with pytest.raises(UserError, match="features of layer 4, but the model has 3"):
        LayerInputs(model, (1, 4))


@pytest.mark.long
def test_a_compiled_forward_touches_features_of_its_tokens_alone(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    eager = EagerRunner(tiny_pair.target, 32, 4096, compact=True, features=(0, 1, 2))
    target = CompiledRunner(eager, "0")
    before = psutil.Process().memory_info().rss
    target.forward(Batch([1], [TEXT]))
    taken = psutil.Process().memory_info().rss - before
    assert taken < 25 << 20  # a copy of the store would take 50 MiB
