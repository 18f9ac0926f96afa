"""The engine is token-identical to `generate` for every family of decoder-only models."""

import pytest
import torch
import transformers

from specdec_core.config import AUTOREGRESSIVE, PairSpec, RunnerSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.compiled import captured
from specdec_core.models.packing import pack_linear_layers
from specdec_core.models.pair import Pair, load_pair
from tests.conftest import SHAPE, generated, tiny_tokenizer
from tests.specdec_core.kinds import chain, configured

GATED = {**SHAPE, "intermediate_size": 64}
GROUPED = {**GATED, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8}

FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-untied-mha": transformers.LlamaConfig(**GATED, tie_word_embeddings=False),
    "mistral-window": transformers.MistralConfig(**GROUPED, sliding_window=12),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen2-mixed-window": transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=12, max_window_layers=2
    ),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "gemma2-window": transformers.Gemma2Config(**GEMMA),
    "gemma3-window": transformers.Gemma3TextConfig(**GEMMA),
    "gpt2": transformers.GPT2Config(
        vocab_size=320, n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2
    ),
    "opt": transformers.OPTConfig(
        **SHAPE, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2, dropout=0.0
    ),
    "phi": transformers.PhiConfig(**GATED),
    "gpt-neox": transformers.GPTNeoXConfig(**GATED),
}
EAGER_ATTENTION = {"gemma2-window"}  # its rows are run one by one
PROMPTS = [[7 + (3 * i * n) % 300 for i in range(n)] for n in (1, 6, 19, 40)]
NEW_TOKENS = 24
REQUESTS = [
    Request(str(i), tuple(prompt), NEW_TOKENS, ignore_eos=True) for i, prompt in enumerate(PROMPTS)
]


def noisy_copy(model, config):
    """A draft that agrees with `model` often, not always."""
    draft = transformers.AutoModelForCausalLM.from_config(config).eval()
    draft.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.1 * parameter.std(correction=0) * noise
    return draft


# Every other test decodes a Llama, and Qwen2 is here with windows.
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("llama", "qwen2")])
def test_greedy_output_is_token_identical_to_generate(family):
    torch.manual_seed(0)
    config = FAMILIES[family]
    target = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    reference = [generated(target, p, NEW_TOKENS, eos_token_id=None) for p in PROMPTS]
    assert len({tuple(r) for r in reference}) > 1, "the model ignores its prompt"

    spec = PairSpec(target=family, drafts={"noisy": "copy"}, runner=RunnerSettings(max_length=256))
    pair = Pair(spec, tiny_tokenizer(), target, {"noisy": noisy_copy(target, config)})
    chains = configured(chain(max_tokens=4))
    decoded = [
        (AUTOREGRESSIVE, 3),
        (chains, 1),
        (chains, 3),
        (configured({"kind": "tree", "branching": (4, 2, (1, 0, 2, 1, 1, 1, 0, 1))}), 3),
        # Branches deeper than the sliding windows are wide.
        (configured({"kind": "fork", "policy": {"kind": "fixed", "max_tokens": 16}}), 3),
    ]
    accepted = 0
    for configuration, slots in decoded:
        engine = Engine(pair, configuration, slots)
        generations = engine.generate(REQUESTS)
        assert [g.tokens for g in generations] == reference, (configuration.label, slots)
        if slots > 1 and family not in EAGER_ATTENTION:
            assert engine.target.packs
        accepted += sum(r.accepted for g in generations for r in g.rounds)
    for model in (target, *pair.drafts.values()):
        pack_linear_layers(model)
    packed = Engine(pair, chains, 3).generate(REQUESTS)
    assert [g.tokens for g in packed] == reference, "with packed weights"
    assert accepted > 0, "nothing was ever accepted, so nothing was shown"


@pytest.mark.long
@pytest.mark.filterwarnings("error:running without")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_graphs_write_what_eager_forwards_do(family, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # On a GPU kernels are captured unfused: fusing the kernels of every family takes too long.
    monkeypatch.setattr(captured, "fused", lambda step, *_: step)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tree = configured({"kind": "tree", "branching": (3, 2, (1, 0, 2, 1, 1, 0))})
    settings = RunnerSettings(max_length=256, target_dtype="float32", draft_dtype="float32")
    written = []
    for compiled in (False, True):
        runner = settings.model_copy(update={"compile": compiled})
        models = {"target": str(tmp_path), "drafts": {"same": str(tmp_path)}}
        pair = load_pair(PairSpec(**models, runner=runner))
        for configuration in (AUTOREGRESSIVE, tree):
            engine = Engine(pair, configuration, 3)
            written.append([g.tokens for g in engine.generate(REQUESTS)])
            assert engine.target.mixes == (family not in EAGER_ATTENTION)
    assert all(tokens == written[0] for tokens in written)


@pytest.mark.parametrize("family", ["qwen2-mixed-window", "gemma2-window", "opt"])
def test_a_folder_loads_with_measured_data_types(family, tmp_path):
    """Choosing the data type runs a shortened model of the family."""
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = load_pair(PairSpec(target=str(tmp_path), drafts={"same": str(tmp_path)}))
    # On a GPU it is the checkpoint's.
    measured = ("auto",) if torch.cuda.is_available() else ("float32", "bfloat16")
    assert pair.spec.runner.target_dtype in measured
    assert pair.target.config.num_hidden_layers == model.config.num_hidden_layers
    engine = Engine(pair, configured({"kind": "draft_model"}))
    (generation,) = engine.generate([Request("r", (5, 6, 7), 8, ignore_eos=True)])
    assert len(generation.tokens) == 8
