"""vLLM's compiled models on a CPU, loaded again by later processes.

vLLM 0.32 keeps compiled models in files. It expects that what is loaded from these has the method
`finalize_loading`, but the CPU build's are functions, which have and need none. So every process
compiled its models anew, for a minute or more. It also compiles anew for other cores, although only
the number of cores matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

METHOD = "finalize_loading"
CORES = "VLLM_CPU_OMP_THREADS_BIND"  # the variable that binds threads to cores


def repair() -> None:
    """In a process of vLLM: have functions that are loaded take the call, and find them on other
    cores."""
    from vllm import envs

    own = torch.compiler.load_compiled_function
    if not isinstance(own, Loading):
        torch.compiler.load_compiled_function = Loading(own)
    if not isinstance(envs.compile_factors, Factors):
        envs.compile_factors = Factors(envs.compile_factors)


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


class Factors:
    """The variables that decide what is compiled: the number of threads instead of their cores."""

    def __init__(self, own: Callable[[], dict[str, object]]) -> None:
        self._own = own

    def __call__(self) -> dict[str, object]:
        others = {name: value for name, value in self._own().items() if name != CORES}
        return {**others, "threads": torch.get_num_threads()}
