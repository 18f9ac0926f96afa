"""`specdec lab forwards` times every size, and knows what a forward reads."""

from research.forwards.timing import bytes_read, random_model, time_shape
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.models.cache import SlotCache
from tests.observers import Heard


def test_each_size_is_timed():
    model = random_model("tiny", "float32")
    timed = time_shape(model, (1, 2), (1, 3), (8,), 1, False, Observer())
    sizes = [(each.rows, each.width, each.context) for each in timed]
    assert sizes == [(1, 1, 8), (1, 3, 8), (2, 1, 8), (2, 3, 8)]
    assert all(each.seconds > 0 for each in timed)


def test_rows_whose_cache_does_not_fit_are_a_warning(monkeypatch):
    make = SlotCache.new_store

    def new_store(cache, *arguments):
        if cache.slots == 3:
            raise UserError("a cache of 3 rows does not fit")
        return make(cache, *arguments)

    monkeypatch.setattr(SlotCache, "new_store", new_store)
    model, heard = random_model("tiny", "float32").cpu(), Heard()
    timed = time_shape(model, (1, 3), (1,), (8,), 1, False, heard)
    assert [each.rows for each in timed] == [1]
    assert heard.warnings == ["3 rows of 8 tokens do not fit this device"]


def test_a_forward_reads_weights_once_and_the_cache_of_each_row():
    model = random_model("tiny", "float32")
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    weights = 2 * layer + 64 + 64 * 512  # without the input embeddings
    assert bytes_read(model, 1, 0) == 4 * weights
    assert bytes_read(model, 3, 10) - bytes_read(model, 1, 0) == 3 * 10 * 2 * 2 * 2 * 16 * 4
