"""Calls that run as Ray tasks: an error ends one call, and a lost process costs a retry."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ray.cloudpickle import register_pickle_by_value

from cluster.parallel import in_parallel


def steps(name: str, folder: Path) -> Iterator[int]:
    yield 1
    if name == "silent":
        raise MemoryError
    if name == "killed" and not (folder / name).exists():
        (folder / name).touch()
        os._exit(1)
    yield 2


def test_an_error_without_a_message_and_a_lost_process_end_no_other_call(
    ray_running: None, tmp_path: Path
) -> None:
    register_pickle_by_value(sys.modules[__name__])  # else processes import what this file does
    calls = {name: (name, tmp_path) for name in ("silent", "killed", "whole")}
    failed: dict[str, str] = {}
    found: dict[str, list[int]] = {name: [] for name in calls}
    for name, value in in_parallel(steps, calls, 1, "cpu", failed.__setitem__):
        found[name].append(value)
    assert failed == {"silent": "MemoryError"}
    assert found["whole"] == [1, 2]
    assert (tmp_path / "killed").exists()
    assert found["killed"][-2:] == [1, 2]  # from the beginning


def test_without_calls_ray_does_not_start() -> None:
    assert list(in_parallel(steps, {}, 10**6, "cpu", {}.__setitem__)) == []
