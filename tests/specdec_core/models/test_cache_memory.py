"""A cache takes the memory of what it holds, in huge pages where they help."""

import gc
import mmap
import sys
import weakref
from pathlib import Path

import psutil
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.config.kinds import DRAFTERS
from specdec_core.engine import Engine, Request
from specdec_core.models import huge_pages
from specdec_core.models.cache import PooledCache, SlotCache, Store
from specdec_core.models.compiled import CompiledRunner, captured
from specdec_core.models.eager import EagerRunner
from tests.conftest import tiny_llama
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.drafting.proofs import PROMPTS
from tests.specdec_core.kinds import drafter
from tests.specdec_core.models.test_captured import AtOnce

SLOTS, TOKENS, HEADS, SIZE, LAYERS = 4, 1500, 8, 64, 2
HELD = SLOTS * TOKENS * LAYERS * 2 * HEADS * SIZE * 4  # bytes of keys and values in float32


def resident():
    """Bytes of memory that this process has."""
    return psutil.Process().memory_info().rss


def filled(cache, row, states):
    cache.open_window([row], [states.shape[2]])
    for layer in cache.layers:
        layer.update(states, states)
    cache.append([row], [states.shape[2]])


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's count of its memory")
def test_memory_follows_the_tokens_held():
    states = torch.randn(1, HEADS, TOKENS, SIZE)
    cache = SlotCache(LAYERS, SLOTS, 4096, torch.float32)
    filled(SlotCache(LAYERS, 1, TOKENS, torch.float32), 0, states)  # what the first time takes
    before = resident()
    for row in range(SLOTS):
        filled(cache, row, states)
    assert 0.9 * HELD < resident() - before < 1.2 * HELD
    kept = cache.layers[0].keys[1, :, :100].clone()
    cache.truncate(0, 0)
    cache.truncate(1, 100)
    assert resident() - before < 0.7 * HELD
    assert torch.equal(cache.layers[0].keys[1, :, :100], kept)
    filled(cache, 0, states)
    assert torch.equal(cache.layers[0].values[0, :, :TOKENS], states[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's count of its memory")
def test_memory_that_holds_nothing_is_kept_up_to_a_bound_over_all_rows():
    states = torch.randn(1, HEADS, 1000, SIZE)
    cache = SlotCache(LAYERS, 8, 4096, torch.float32)
    filled(SlotCache(LAYERS, 1, 1000, torch.float32), 0, states)  # what the first time takes
    empty = resident()
    for row in range(8):
        filled(cache, row, states)
    taken = resident() - empty
    cache.truncate(0, 0)
    assert resident() - empty > 0.99 * taken  # the next sequence takes it again
    for row in range(1, 8):
        cache.truncate(row, 300)
    bound = sum(cache.lengths) + 1024 + 8 * 2 * 64
    assert resident() - empty <= 1.02 * bound / 8000 * taken


def test_a_pool_takes_the_memory_of_the_tokens_it_is_for():
    # As many as sixteen requests of 1,000 tokens hold, which might come to have 2,048.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    states = torch.randn(1, HEADS, 1000, SIZE, device=device)
    cache = PooledCache(LAYERS, 16, 2048, device, torch.float32, 16 * 1000)
    for row in range(16):
        filled(cache, row, states)
    assert cache.version == 0
    taken = sum(store.tensor.nbytes for store in cache.stores())
    assert taken < 1.2 * states.nbytes * 2 * LAYERS * 16


def test_rows_that_do_not_fit_are_one_line_and_may_be_tried_again():
    cache = SlotCache(1, 2, 10**12)
    states = torch.zeros(1, HEADS, 1, SIZE)
    for _ in range(2):
        with pytest.raises(UserError, match=r"^a cache of 2 rows of 10{9}.* does not fit on cpu: "):
            filled(cache, 0, states)
        assert not cache.stores()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pool_that_does_not_fit_is_one_line():
    cache = PooledCache(1, 64, 1 << 24, torch.device("cuda"), torch.float32)
    states = torch.zeros(1, 1, 1, 256, device="cuda")
    with pytest.raises(UserError, match="does not fit on cuda:0: fewer slots"):
        filled(cache, 0, states)


@pytest.fixture
def uncollected():
    """Without Python's collection of reference cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_caches_of_an_engine_go_with_it(tiny_pair, kind, bare_home, monkeypatch, uncollected):
    made: list[weakref.ref[Store]] = []
    make = Store.__init__

    def counted(store, *args):
        make(store, *args)
        made.append(weakref.ref(store))

    monkeypatch.setattr(Store, "__init__", counted)

    def decode():
        link = InTurns(tiny_pair, seed=1)  # to PEARL's draft
        engine = Engine(linked(tiny_pair, link), Configuration(drafter=drafter(kind)), 2)
        engine.generate([Request(str(n), text, 12) for n, text in enumerate(PROMPTS[:2])])
        assert any(store() for store in made)

    decode()
    assert not any(store() for store in made)


@pytest.mark.filterwarnings("error:running without")
def test_the_pool_of_captured_graphs_goes_with_their_runner(monkeypatch, uncollected):
    monkeypatch.setattr(captured, "fused", lambda step, *_: step)
    monkeypatch.setattr(captured, "Captured", AtOnce)
    model = tiny_llama(0, hidden=32, layers=2, vocab=320)
    below = EagerRunner(model, 3, 200, compact=True, pooled=True, cache_tokens=1)
    runner = CompiledRunner(below, "weights")
    gone = weakref.ref(runner.cache)
    del below, runner
    assert gone() is None


MIB = 1 << 20


def in_huge_pages(address):
    """KiB in huge pages of the mapping that holds the address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            start, end = (int(edge, 16) for edge in first.split("-"))
            here = start <= address < end
        elif here and first == "AnonHugePages:":
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.fixture
def mapped():
    file = Path("/proc/self/pagemap")
    if not file.exists():
        pytest.skip("this system does not say which pages are in use")
    return file


def test_full_memory_moves_and_keeps_its_content(mapped):
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[always]" in enabled.read_text():
        pytest.skip("this system gives huge pages to all, so there are none to move")
    numbers = torch.arange(16 * MIB // 8)
    before = in_huge_pages(numbers.data_ptr() + 4 * MIB)
    settled = huge_pages.settle()
    if not settled:
        pytest.skip("this system gives no huge pages to who asks")
    assert before == 0
    assert in_huge_pages(numbers.data_ptr() + 4 * MIB) >= 12 * 1024
    assert torch.equal(numbers, torch.arange(16 * MIB // 8))
    assert huge_pages.settle() >= settled - 4 * MIB  # what is there already is not moved again


def test_memory_in_which_little_is_written_stays_small(mapped):
    hollow = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge_pages.settle()
    for start in range(0, len(hollow), huge_pages.SIZE):
        hollow[start] = 1
    before = resident()
    huge_pages.settle()
    assert resident() - before < 16 * MIB
