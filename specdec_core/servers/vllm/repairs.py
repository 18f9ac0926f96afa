"""What is repaired in vLLM's CPU build.

Where this library is installed, vLLM calls `repair` when any of its processes starts: it is an
entry point of the group `vllm.general_plugins`.
"""

from __future__ import annotations

from specdec_core.servers.vllm import compiled, hidden_states, sampling

GROUP = "vllm.general_plugins"
NAME = "specdec"
ENTRY_POINT = f"{__name__}:repair"


def repair() -> None:
    """In a process of vLLM on a CPU: repair what is wrong. Calling it again does nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        sampling.repair()
        compiled.repair()
        hidden_states.repair()
