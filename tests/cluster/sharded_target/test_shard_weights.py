"""The parts of a model of any family compute together what the whole computes."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from cluster.sharded_target import operators
from cluster.sharded_target.exchange import all_agree
from cluster.sharded_target.shard_weights import check_target, layers_of, load_heads, load_layers
from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost
from specdec_core.config import PairSpec, TargetPlacement
from specdec_core.models.compiled import CompiledRunner
from specdec_core.models.compiled.failures import CannotCompile
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.eager import EagerRunner
from specdec_core.models.packing import pack_linear_layers
from specdec_core.models.runner import Batch
from tests.cluster.sharded_target.test_exchange import connected
from tests.conftest import SHAPE

# Two ranks cannot share the vocabulary evenly.
UNEVEN = {**SHAPE, "vocab_size": 319, "num_hidden_layers": 3}
GROUPED = {**UNEVEN, "intermediate_size": 64, "num_key_value_heads": 2}
GPT = {"vocab_size": 319, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-untied-biased": transformers.LlamaConfig(
        **GROUPED, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8, tie_word_embeddings=True),
    "qwen2-mixed-window": transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "gemma3-window": transformers.Gemma3TextConfig(
        **{**GROUPED, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    ),
    "gpt2": transformers.GPT2Config(**GPT, initializer_range=0.2),
    "opt": transformers.OPTConfig(
        **UNEVEN, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2, dropout=0.0
    ),
    "gptj": transformers.GPTJConfig(
        **GPT, rotary_dim=4, initializer_range=0.2
    ),  # its layers return tuples
}
BY_HEADS = ["llama", "llama-untied-biased", "qwen3", "qwen2-mixed-window", "gemma3-window"]
CASES = [(name, "heads") for name in BY_HEADS] + [(name, "layers") for name in FAMILIES]


def logits_of(runner):
    """Of ragged rows, a tree, and what is kept of it."""
    runner.prefill([0, 1], [list(range(5, 25)), list(range(40, 50))])
    found = [runner.forward(Batch([1, 0], [[5, 6, 7], [8, 9, 1]])).logits]
    found.append(runner.forward(Batch([0], [[9, 10, 11, 12]], [[-1, 0, 0, 1]])).logits)
    runner.keep(0, 23, [0, 2])
    found.append(runner.forward(Batch([0, 1], [[3], [318]])).logits)
    return found


def by_graphs(model, exchange, split):
    """The logits of a rank's graphs, which are those of eager forwards."""
    agree = partial(all_agree, exchange, model.device)

    def opened():
        eager = EagerRunner(model, 2, 128, compact=True, agree=agree)
        return CompiledRunner(eager, f"{split} {exchange.rank}")

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="running without")
        runner = opened()
    found = logits_of(runner)
    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == 1:
            patch.setattr(Packages, "open", refuse)
        with pytest.warns(match="running without"):
            eager = opened()
    # All ranks run eagerly where one has no graph, or what they exchange would differ in size.
    for own, wanted in zip(found, logits_of(eager), strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-5, rtol=1e-5)
    if split == "heads":
        assert_a_loss_is_known(runner, exchange)
    return found


def refuse(*_):
    raise CannotCompile("no compiler here")


def assert_a_loss_is_known(runner, exchange):
    """Though a graph reports every error as a RuntimeError."""
    for wire in exchange._wires.values():
        if exchange.rank == 1:
            wire.close()
    if exchange.rank == 0:
        with pytest.raises(RuntimeError) as raised:
            runner.forward(Batch([0], [[5]]))
        assert isinstance(operators.cause_of(raised.value), LinkLost)


def part(rank, folder, split, how):
    """One of two processes."""
    store = dist.FileStore(f"{folder}/store-{split}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    load = load_heads if split == "heads" else load_layers
    exchange = connected(rank, 2, Path(folder) / "ranks")
    model = load(folder, torch.float32, exchange)
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    once = {p.data_ptr(): p.numel() for p in own}  # of tied ones
    torch.save(sum(once.values()), f"{folder}/size-{rank}")
    if how == "packed":
        pack_linear_layers(model)
    if how == "compiled":
        found = by_graphs(model, exchange, split)
    else:
        found = logits_of(EagerRunner(model, 2, 128, packs=False))
    if rank == (0 if split == "heads" else 1):
        torch.save(found, f"{folder}/logits-{split}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("family", "split"), CASES)
def test_two_parts_compute_what_the_whole_computes(family, split, tmp_path):
    how = "packed" if family == "llama" else "plain"
    assert_two_parts_are_the_whole(family, split, how, tmp_path)


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("llama-untied-biased", "heads"),
        pytest.param("gpt2", "layers", marks=pytest.mark.long),
        pytest.param("gemma3-window", "heads", marks=pytest.mark.long),
        pytest.param("qwen2-mixed-window", "layers", marks=pytest.mark.long),
    ],
)
def test_two_compiled_parts_compute_what_the_whole_computes(family, split, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_two_parts_are_the_whole(family, split, "compiled", tmp_path)


def assert_two_parts_are_the_whole(family, split, how, folder):
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).float().eval()
    whole.save_pretrained(folder)
    mp.start_processes(part, (str(folder), split, how), 2, start_method="fork")
    together = torch.load(folder / f"logits-{split}")
    for ours, theirs in zip(together, logits_of(EagerRunner(whole, 2, 128)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    return whole


@pytest.mark.parametrize(("family", "split"), [("qwen3", "heads"), ("gpt2", "layers")])
def test_each_rank_has_only_its_part(family, split, tmp_path):
    model = assert_two_parts_are_the_whole(family, split, "plain", tmp_path)
    has = [torch.load(tmp_path / f"size-{rank}") for rank in range(2)]
    whole = model.num_parameters()
    if split == "heads":
        norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
        uneven = model.config.hidden_size  # one rank has a token of the vocabulary more
        assert has == [(whole - norms + n) // 2 + norms for n in (uneven, -uneven)]
    else:
        layer = sum(p.numel() for p in model.transformer.h[0].parameters())
        beside = whole - 3 * layer  # embeddings, which begin and end the model, and a norm
        assert has == [beside + layer, beside + 2 * layer]


@pytest.mark.parametrize("split", ["heads", "layers"])
def test_weights_that_do_not_fit_are_refused_as_for_a_whole_model(split, tmp_path):
    """Tensors of a layer of one rank are missing, others are of a layer of no rank."""
    transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused = r"UserError: .*: its weights do not fit .*unknown tensors: model\.layers\.7\.mlp\.up"
    with pytest.raises(mp.ProcessRaisedException, match=refused):
        mp.start_processes(part, (str(tmp_path), split, "plain"), 2, start_method="fork")


def test_a_split_that_the_model_does_not_allow_names_what_it_does(tmp_path):
    def check(config, split, devices):
        config.save_pretrained(tmp_path)
        check_target(PairSpec(target=str(tmp_path)), TargetPlacement(split=split, devices=devices))

    llama = transformers.LlamaConfig(
        hidden_size=96, num_attention_heads=12, num_key_value_heads=4, num_hidden_layers=2
    )
    with pytest.raises(
        UserError,
        match=r"12 attention heads and 4 key-value .* among 3 devices; use target\.devices:"
        r" 1 or 2 or 4, or target\.split: layers",
    ):
        check(llama, "heads", 3)
    check(llama, "heads", 4)
    with pytest.raises(UserError, match=r"no tensor-parallel plan for gpt2; use target\.split"):
        check(transformers.GPT2Config(), "heads", 2)
    with pytest.raises(UserError, match="only 2 layers"):
        check(llama, "layers", 3)


@pytest.mark.parametrize(("layers", "parts"), [(3, 2), (7, 3), (32, 15), (4, 4)])
def test_every_layer_is_on_one_rank(layers, parts):
    split = [layers_of(layers, rank, parts) for rank in range(parts)]
    assert [layer for own in split for layer in own] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1
