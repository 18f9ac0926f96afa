"""A benchmark divides the cores that it may use."""

import os

import pytest

from cluster.load.cores import Cores
from specdec_core.base.errors import UserError


def test_cores_are_divided_between_the_engine_and_the_others(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    assert Cores.divide(1) == Cores((2,), (3, 5))
    assert Cores.divide(3) == Cores((2, 3, 5), (2, 3, 5))
    with pytest.raises(UserError, match=r"runner\.threads 4: this process may use 3 cores"):
        Cores.divide(4)
    assert "core 2, the load client on core 3, 5" in Cores.divide(1).sentence
