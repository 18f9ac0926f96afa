"""The attention operator on CPUs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from specdec_core.base.operators import loaded

SOURCE = Path(__file__).with_name("attend.cpp")


@cache
def available() -> bool:
    """Whether the operator is there, built where it is missing."""
    without = "attention of several rows goes without its operator"
    return loaded(SOURCE, "the attention of several rows", without)
