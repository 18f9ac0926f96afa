"""vLLM's compiled models on a CPU, loaded again by later processes.

vLLM 0.32 keeps what it has compiled, and calls a method of what it loads from there. What its CPU
build loads is a function, which has no such method and needs none. So every process compiled its
models anew, for a minute or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

METHOD = "finalize_loading"


def repair() -> None:
    """In a process of vLLM: have functions that are loaded take the call."""
    own = torch.compiler.load_compiled_function
    if not isinstance(own, Loading):
        torch.compiler.load_compiled_function = Loading(own)


class Loading:
    """Torch's own loading, whose functions take the call that vLLM makes."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, *args: Any, **options: Any) -> Any:
        found = self._own(*args, **options)
        function = found._artifacts.compiled_fn
        if not hasattr(function, METHOD):
            setattr(function, METHOD, lambda config: None)
        return found
