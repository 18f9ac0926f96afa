"""Devices on which a part of the target fits, and the whole target does not."""

from typing import Any

from specdec_core.models import pair


def install() -> None:
    """In a process of the cluster, before it does anything."""
    load: Any = pair._load_model

    def load_small(name: str, dtype: str, runner: Any, target: str | None = None) -> Any:
        if target is None:
            raise MemoryError("the whole target does not fit on a device")
        return load(name, dtype, runner, target)

    pair._load_model = load_small
