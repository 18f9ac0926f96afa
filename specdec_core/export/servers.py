"""The servers that can be exported to, by the names that `--to` takes."""

from __future__ import annotations

from specdec_core.base.errors import UserError
from specdec_core.export.llama_cpp import LlamaCpp
from specdec_core.export.server import Server
from specdec_core.export.sglang import SgLang
from specdec_core.export.tensorrt_llm import TensorRtLlm
from specdec_core.export.transformers import Transformers
from specdec_core.export.vllm import Vllm

SERVERS: dict[str, Server] = {
    server.name: server for server in (Vllm(), SgLang(), TensorRtLlm(), LlamaCpp(), Transformers())
}


def server_of(name: str, version: str | None = None) -> Server:
    """The server of a name. Raises :class:`UserError` for another name, or for a version whose
    settings are not known."""
    if name not in SERVERS:
        raise UserError(f"--to {name}: expected one of {', '.join(SERVERS)}")
    server = SERVERS[name]
    if version is not None and not _matches(version, server.known):
        raise UserError(
            f"--version {version}: of {server.title} the settings of {', '.join(server.known)} are"
            " known"
        )
    return server


def _matches(version: str, known: tuple[str, ...]) -> bool:
    """A release of a known version, as 0.32.1 of 0.32, counts as that."""
    return any(version == one or version.startswith(f"{one}.") for one in known)
