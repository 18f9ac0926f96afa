"""vLLM's compiled models on a CPU, loaded again by later processes.

vLLM 0.32 keeps compiled models in files. It expects that what is loaded from these has the method
`finalize_loading`, but the CPU build's are functions, which have and need none. So every process
compiled its models anew, for a minute or more. It also compiles anew for other cores, although only
the number of cores matters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

METHOD = "finalize_loading"
CORES = "VLLM_CPU_OMP_THREADS_BIND"  # the variable that binds threads to cores


def repair() -> None:
    """In a process of vLLM: have functions that are loaded take the call, and find them on other
    cores."""
    from vllm import envs

    own = torch.compiler.load_compiled_function
    if getattr(own, "func", None) is not load:
        torch.compiler.load_compiled_function = partial(load, own)
    if getattr(envs.compile_factors, "func", None) is not factors:
        envs.compile_factors = partial(factors, envs.compile_factors)


def load(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Torch's own loading; a loaded function gets the method that vLLM calls."""
    found = own(*args, **options)
    function = found._artifacts.compiled_fn
    if not hasattr(function, METHOD):
        setattr(function, METHOD, lambda config: None)
    return found


def factors(own: Callable[[], dict[str, object]]) -> dict[str, object]:
    """The variables that decide what is compiled: the number of threads instead of their cores."""
    others = {name: value for name, value in own().items() if name != CORES}
    return {**others, "threads": torch.get_num_threads()}
