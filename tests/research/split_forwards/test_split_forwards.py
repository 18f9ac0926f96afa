"""`specdec lab split-forwards` times a target in one process and in several."""

from itertools import product

import pytest

from research.split_forwards.timing import HOW, Size, opened, time_sizes
from specdec_core.base.observer import Observer


@pytest.mark.long
def test_each_size_is_timed_whole_and_split(tiny_spec, ray_running):
    sizes = [Size(1, 1), Size(2, 3)]
    with opened(tiny_spec, 2, 2, Observer()) as own:
        runners = {("eager", how): runner for how, runner in own.items()}
        medians = time_sizes(runners, sizes, 8, 1, Observer())
    assert list(medians) == sizes
    assert all(medians[size]["eager", how] > 0 for size, how in product(sizes, HOW))
