"""`specdec lab forwards` times every size, and knows what a forward reads."""

from research.forwards.timing import bytes_read, random_model, time_shape
from specdec_core.base.observer import Observer


def test_each_size_is_timed():
    model = random_model("tiny", "float32")
    timed = time_shape(model, (1, 2), (1, 3), (8,), 1, False, Observer())
    sizes = [(each.rows, each.width, each.context) for each in timed]
    assert sizes == [(1, 1, 8), (1, 3, 8), (2, 1, 8), (2, 3, 8)]
    assert all(each.seconds > 0 for each in timed)


def test_a_forward_reads_weights_once_and_the_cache_of_each_row():
    model = random_model("tiny", "float32")
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    weights = 2 * layer + 64 + 64 * 512  # without the input embeddings
    assert bytes_read(model, 1, 0) == 4 * weights
    assert bytes_read(model, 3, 10) - bytes_read(model, 1, 0) == 3 * 10 * 2 * 2 * 2 * 16 * 4
