"""Compiled forwards and products: the same tokens, few graphs for all sizes, kept on disk."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_core.engine import Engine, Request
from specdec_core.models import attention, features, huge_pages
from specdec_core.models.cache import SlotCache
from specdec_core.models.compiled import CompiledRunner, packages, step
from specdec_core.models.compiled.packaged import PackagedPacked
from specdec_core.models.compiled.packages import Packages, load
from specdec_core.models.compiled.step import PackedStep
from specdec_core.models.eager import EagerRunner
from specdec_core.models.pair import load_pair, resolve_dtypes
from specdec_core.models.products import operator as products_operator
from specdec_core.models.products.graph import replace_linear_layers
from specdec_core.models.reduced_draft import model
from specdec_core.models.row_attention import operator, plans
from specdec_core.models.runner import Batch
from tests.specdec_core.kinds import configured
from tests.specdec_core.models.test_captured import two_kinds_of_layers

pytestmark = pytest.mark.filterwarnings("error:running without")

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [20, 21, 22, 20, 21], [30, 31, 30, 31, 30]]
TREE = [-1, 0, 0, 1, 2]
LOOKUP = {"kind": "prompt_lookup", "max_ngram": 2, "max_tokens": 4}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """A folder of graphs that all tests here share: compiling one takes seconds."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "specdec" / "graphs"


@pytest.fixture(scope="module")
def compiled_pair(tiny_spec, graphs):
    return load_compiled(tiny_spec, device="cpu")


def load_compiled(spec, **settings):
    """The target alone."""
    alone = spec.model_copy(update={"drafts": {}})
    return load_pair(alone.with_runner(compile=True, max_length=96, **settings))


def decoded(pair, drafter, slots):
    engine = Engine(pair, configured(drafter), slots)
    requests = [Request(str(n), tuple(own), 32) for n, own in enumerate(PROMPTS)]
    return [generation.tokens for generation in engine.generate(requests)]


def both(pair, slots=3):
    """An eager and a compiled runner of the target."""
    compiled = pair.open_runner(None, slots)
    assert isinstance(compiled, CompiledRunner)
    return EagerRunner(pair.target, slots, pair.max_length, compact=True), compiled


@pytest.fixture(params=["packed", pytest.param("windows", marks=pytest.mark.long)])
def runners(request, compiled_pair):
    """An eager and a compiled runner of the target, or of a draft with two kinds of layers."""
    model, length = compiled_pair.target, compiled_pair.max_length
    if draft := request.param == "windows":
        model = two_kinds_of_layers()
    weights = {"packed": compiled_pair.fingerprints["target"]}
    eager = EagerRunner(model, 3, length, compact=True)
    compiled = CompiledRunner(eager, weights.get(request.param, request.param), draft)
    assert compiled.mixes
    return EagerRunner(model, 3, length), compiled


def forwards(runners, *batch):
    eager, compiled = (runner.forward(Batch(*batch)) for runner in runners)
    assert eager.choices() == compiled.choices()
    return eager, compiled


def assert_close(found, expected, atol):
    torch.testing.assert_close(found.logits, expected.logits, atol=atol, rtol=0)
    sure = expected.logits.float().softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(found.confidence, sure, atol=max(atol, 1e-6), rtol=0)


def test_compiled_engines_write_the_eager_engines_tokens(tiny_pair, compiled_pair, graphs):
    expected = decoded(tiny_pair, None, 1)
    assert decoded(compiled_pair, LOOKUP, 1) == expected
    made = [path.name for path in graphs.glob("*/*") if path.is_dir()]
    assert made == ["packed"], "one graph of a model, whatever the sizes"


@pytest.mark.long
def test_a_second_start_compiles_nothing(compiled_pair, monkeypatch):
    both(compiled_pair)

    def refuse(*args, **kwargs):
        raise AssertionError("compiled again")

    monkeypatch.setattr(torch.export, "export", refuse)
    again = both(compiled_pair)
    for runner in again:
        runner.prefill([1], [PROMPTS[1]])
    eager, compiled = forwards(again, [1], [[3, 4, 5, 6]])
    assert_close(compiled, eager, atol=2e-5)


# Opens the graphs of the pair it is given, and holds them until its input ends.
HOLD = """
import sys
import torch
from specdec_core.config import PairSpec
from specdec_core.models.pair import load_pair
torch.set_num_threads(1)
runner = load_pair(PairSpec.model_validate_json(sys.argv[1])).open_runner(None, 3)
print("loaded", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("changed", [attention, features, model, operator, plans, step])
def test_graphs_of_other_code_are_not_loaded(changed, monkeypatch):
    """Also of a model of this library's own, as a reduced draft is."""
    traced = PackedStep.__new__(PackedStep)
    nn.Module.__init__(traced)
    traced.model = type("Own", (nn.Module,), {"__module__": model.__name__})()
    before, source = packages._digest(traced, ()), inspect.getsource
    assert packages._digest(traced, ()) == before
    monkeypatch.setattr(inspect, "getsource", lambda of: source(of) + "# changed" * (of is changed))
    assert packages._digest(traced, ()) != before


@pytest.mark.long
def test_processes_share_one_copy_and_leave_nothing_behind_even_killed(
    compiled_pair, graphs, tmp_path
):
    both(compiled_pair)
    kept = set(graphs.glob("*/*"))
    # The probes of what the processor can do lie where torch keeps them.
    places = {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": cache_dir()}
    command = [sys.executable, "-c", HOLD, compiled_pair.spec.model_dump_json()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first, second = (
        subprocess.Popen(command, env={**os.environ, **places}, text=True, **pipes)
        for _ in range(2)
    )
    for process in (first, second):
        assert process.stdout.readline() == "loaded\n", process.communicate()
    assert list(tmp_path.iterdir()) == []
    first.kill()
    first.wait()
    _, said = second.communicate()
    assert "compiling packed" not in said
    assert set(graphs.glob("*/*")) == kept
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_weights_of_a_graph_lie_in_huge_pages(graphs, tmp_path):
    def in_huge_pages():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

    if not huge_pages.settle():
        pytest.skip("this system gives no huge pages to who asks")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=8, vocab_size=4096)
    model = LlamaForCausalLM(config).eval()
    CompiledRunner(EagerRunner(model, 1, 64, compact=True), "large")
    largest = max(graphs.rglob("*"), key=lambda path: path.stat().st_size)
    graph = next(folder for folder in graphs.glob("*/*") if folder in largest.parents)
    again = tmp_path / "again"
    shutil.copytree(graph, again)  # what is loaded already would be shared
    huge_pages.settle()
    before = in_huge_pages()
    load(again)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) // 1024
    assert in_huge_pages() - before > 0.8 * weights


def test_rows_between_and_trees_leave_every_text_alone(runners):
    for runner in runners:
        runner.prefill([0, 1, 2], PROMPTS)
        runner.watch_hidden(True)
    for arguments in (
        ([2, 0], [[1, 2, 3], [4, 5]]),  # row 1 lies between them
        ([0, 1, 2], [[7, 8, 9, 10, 11]] * 3, [TREE] * 3),
        ([1], [[40, 41]]),
        # A piece of a prompt, a tree, and the last of a chain.
        ([2, 1, 0], [[1, 2, 3, 4], [7, 8, 9], [5, 6]], [None, [-1, 0, 0], None], [0, 3, 1]),
    ):
        eager, compiled = forwards(runners, *arguments)
        assert_close(compiled, eager, atol=2e-5)
        torch.testing.assert_close(compiled.hidden, eager.hidden, atol=2e-5, rtol=0)
    assert runners[0].lengths == runners[1].lengths


def test_forwards_have_few_widths(compiled_pair, monkeypatch):
    """Each one costs kernels."""
    _, compiled = both(compiled_pair)
    graphs, widths = compiled._graphs, []
    run = graphs._run
    monkeypatch.setattr(
        graphs, "_run", lambda feed, *rest: widths.append(feed.shape[1]) or run(feed, *rest)
    )
    for count in (1, 2, 16, 17, 20, 21, 64, 65, 80):
        assert len(compiled.forward(Batch([1], [[5] * count])).choices()[0]) == count
        compiled.truncate(1, 0)
    assert widths == [1, 2, 16, 20, 20, 24, 64, 80, 80]


def test_padding_leaves_every_text_alone(runners):
    """Forwards of more than 16 tokens are padded, but for the last ones that fit."""
    for runner in runners:
        runner.prefill([0, 1, 2], PROMPTS)
    counts = [17, 3, 21]
    for arguments in (
        ([1], [[*range(40, 59)]]),
        ([2, 0], [[*range(60, 77)], [5]], None, [1, 1]),
        ([0, 1, 2], [[*range(7, 7 + count)] for count in counts], None, [1, 3, 18]),
        ([0, 1, 2], [[7, 8, 9, 10, 11] * 4] * 3, [[-1, *range(19)]] * 3),
        ([1, 0], [[*range(90, 109)], [9]]),
        ([0, 1, 2], [[11], [12], [13]]),
    ):
        eager, compiled = forwards(runners, *arguments)
        assert_close(compiled, eager, atol=2e-5)
    assert runners[0].lengths == runners[1].lengths


def test_without_a_compiler_one_warning_and_the_eager_tokens(compiled_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(UserWarning, match=r"no C\+\+ compiler"),
    ):
        runners = both(compiled_pair)
    for runner in runners:
        runner.prefill([0], [PROMPTS[0]])
    expected, found = forwards(runners, [0], [[3]])
    assert_close(found, expected, atol=0)


@pytest.mark.parametrize("broken", ["folder", "graph"])
def test_where_graphs_cannot_be_kept_or_read_one_warning_and_the_eager_tokens(
    compiled_pair, tmp_path, monkeypatch, broken
):
    place = tmp_path / "place"
    if broken == "folder":
        place.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    monkeypatch.setattr(packages.Packages, "_compile", lambda self, path, *_: path.mkdir())
    with pytest.warns(UserWarning, match=r"running without compiled graphs: .*place"):
        runners = both(compiled_pair)
    expected, found = forwards(runners, [0], [[3, 4]])
    assert_close(found, expected, atol=0)


def test_a_model_whose_rows_are_run_one_by_one_runs_eagerly_after_a_warning(compiled_pair):
    eager = EagerRunner(compiled_pair.target, 2, 64, packs=False)
    with pytest.warns(match="running without compiled graphs: graphs are of packed rows"):
        compiled = CompiledRunner(eager, "alone")
    plain = EagerRunner(compiled_pair.target, 2, 64, packs=False)
    batch = Batch([0, 1], [[5, 6, 7], [8, 9]])
    assert compiled.forward(batch).choices() == plain.forward(batch).choices()


needs_operator = pytest.mark.skipif(
    not products_operator.available(),
    reason="the operator is for AVX-512 with bfloat16, without AMX",
)


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


@needs_operator
@pytest.mark.parametrize("rows", [1, 2, 12, 13, 14, 27, 100])
@pytest.mark.parametrize(("columns", "dimensions"), [(32, 2), (64, 96), (160, 30)])
def test_a_product_is_rounded_once(rows, columns, dimensions):
    x, weight = random(rows, dimensions), random(columns, dimensions)
    wanted = x.double() @ weight.double().T
    found = torch.ops.specdec.multiply(x, products_operator.panels(weight))
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=2**-8)


@needs_operator
def test_a_row_is_bit_for_bit_what_it_is_alone():
    x, panels = random(40, 64), products_operator.panels(random(96, 64))
    together = torch.ops.specdec.multiply(x, panels)
    assert all(torch.equal(torch.ops.specdec.multiply(row[None], panels)[0], own)
               for row, own in zip(x, together, strict=True))  # fmt: skip


@needs_operator
def test_layers_that_read_the_same_rows_become_one_product_and_others_stay():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(16, 64, bias=False), nn.Linear(16, 32, bias=False)
            self.narrow, self.biased = nn.Linear(16, 24, bias=False), nn.Linear(16, 32)

        def forward(self, x):
            return self.query(x), self.narrow(x), self.key(x), self.biased(x)

    layers = Layers().bfloat16().eval()
    x = random(3, 16)
    with torch.no_grad():
        module = torch.export.export(layers, (x,)).module()
        replace_linear_layers(module)
        targets = [str(node.target) for node in module.graph.nodes]
        assert targets.count("specdec.multiply.default") == 1
        assert targets.count("aten.linear.default") == 2
        assert {name for name, _ in module.named_parameters()} == {
            *("narrow.weight", "biased.weight", "biased.bias")
        }
        for found, wanted in zip(module(x), layers(x), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.long
@needs_operator
def test_a_compiled_model_in_bfloat16_multiplies_by_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().eval()
    eager = EagerRunner(model, 3, 96)
    compiled = CompiledRunner(EagerRunner(model, 3, 96), "weights")
    batch = Batch([0, 1, 2], [[5, 6, 7], [9], [*range(20, 40)]])
    with torch.inference_mode():
        found, wanted = compiled.forward(batch).logits, eager.forward(batch).logits
    assert (found.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()
    graph = next(tmp_path.rglob("*.wrapper.cpp"))
    assert "multiply" in graph.read_text()


@needs_operator
@pytest.mark.parametrize("bias", [False, True])
def test_forwards_are_padded_only_where_another_library_multiplies(bias):
    config = LlamaConfig(attn_implementation="eager")
    packages = Packages(nn.Linear(16, 32, bias=bias).bfloat16(), config, [])
    packed: Any = PackagedPacked(packages, SlotCache(1, 1, 64))
    widths: list[tuple[int, int]] = []

    def record(feed, wanted, *_):
        widths.append((feed.shape[1], len(wanted)))
        return [wanted]

    packed._run = record
    tables = torch.zeros((21, 5), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    plan: Any = SimpleNamespace(tables=lambda device: tables)
    feed = [[1] * 21, [0] * 21, range(21), range(21)]
    [found] = packed.run(feed, [*range(4, 21)], [plan])
    assert found.tolist() == [*range(4, 21)]
    assert widths == [(24, 20) if bias else (21, 17)]


@needs_operator
def test_what_the_operator_multiplies_is_in_its_data_type(tiny_spec):
    """Not what a few eager forwards measured: near a tie they say another type each time."""
    auto = {"target_dtype": "auto", "draft_dtype": "auto"}
    resolved = resolve_dtypes(tiny_spec.with_runner(device="cpu", compile=True, **auto)).runner
    assert (resolved.target_dtype, resolved.draft_dtype) == ("bfloat16", "bfloat16")
