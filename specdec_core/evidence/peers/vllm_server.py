"""vLLM's OpenAI server: its modes under load, and the command of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core.evidence.peers.vllm import (
    AUTOREGRESSIVE,
    NGRAM,
    VllmMode,
    draft_modes,
    engine_settings,
    environment_folder,
    inherited_environment,
    library_environment,
    plug_in_environment,
    process_environment,
    python_of,
    suffix_modes,
)
from specdec_core.models.pair import Pair

MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` program needs a package called vllm
# Fewer modes than for single requests: each mode starts a server at each load.
SERVED_TOKENS = (3, 5)  # of a draft
SERVED_NGRAM = [mode for mode in NGRAM if mode.tokens == 4]


@dataclass(frozen=True)
class VllmServer:
    """vLLM's server in one mode."""

    pair: Pair
    mode: VllmMode
    draft: str | None
    python: Path
    version: str

    @property
    def name(self) -> str:
        return self.mode.label + (f", {self.draft}" if self.draft else "")

    def settings(self, requests: int) -> dict[str, Any]:
        """Its engine arguments, to decode up to `requests` requests together."""
        return engine_settings(self.pair, self.mode, self.draft, requests)

    def command(self, requests: int, port: int) -> list[str]:
        """The command that serves on a port of this machine."""
        where = {"host": "127.0.0.1", "port": port}
        flags = as_flags({**self.settings(requests), **where})
        # -P: the current folder may have modules named like those that it needs
        return [str(self.python), "-P", "-m", MODULE, *flags, "--disable-log-stats"]

    def environment(self, cores: Sequence[int], folder: Path) -> dict[str, str]:
        """The variables of its process, its compute threads bound to `cores`, one each. What the
        plug-in needs is in `folder`, which must last as long as the server does."""
        threads = self.pair.spec.runner.threads
        bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if cores else {}
        variables = inherited_environment() | process_environment(threads) | bound
        if self.mode.plug_in is not None:
            variables |= library_environment(folder)
            variables |= plug_in_environment(self.mode.plug_in, self.pair.spec, folder)
        return variables


def vllm_servers(
    pair: Pair, venv: Path | None = None, ours: Sequence[VllmMode] = ()
) -> Iterator[VllmServer]:
    """Autoregressive decoding, n-grams, every draft model, suffixes where `arctic-inference` is
    installed, and the modes `ours`; from the virtual environment `venv`, by default the one of
    `make bench-peers`. Raises :class:`UserError` where there is none."""
    venv = venv or environment_folder()
    python = python_of(venv, "vLLM")
    installed = venv / "lib"
    names = (path.name for path in installed.glob("python*/site-packages/vllm*-*.dist-info"))
    version = next(names, "vllm").removesuffix(".dist-info").replace("-", " ")
    modes: list[tuple[VllmMode, str | None]] = [(AUTOREGRESSIVE, None)]
    modes += [(mode, None) for mode in SERVED_NGRAM]
    for name, own in draft_modes(pair):
        modes += [(mode, name) for mode in own if mode.tokens in SERVED_TOKENS]
    modes += [(mode, None) for mode in suffix_modes(venv)]
    modes += [(mode, None) for mode in ours]
    for mode, draft in modes:
        yield VllmServer(pair, mode, draft, python, version)


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Engine arguments as the server's command line has them."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            shown = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{flag}", shown]
    return flags
