"""vLLM's compiled models on a CPU, loaded again by later processes.

vLLM 0.32 keeps compiled models in files. It expects that what is loaded from these has the method
`finalize_loading`, but the CPU build's are functions, which have and need none. So every process
compiled its models anew, for a minute or more.
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
    """Torch's own loading; a loaded function gets the method that vLLM calls."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, *args: Any, **options: Any) -> Any:
        found = self._own(*args, **options)
        function = found._artifacts.compiled_fn
        if not hasattr(function, METHOD):
            setattr(function, METHOD, lambda config: None)
        return found
