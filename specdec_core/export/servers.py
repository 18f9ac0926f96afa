"""The servers that can be exported to, by the names that `--to` takes."""

from __future__ import annotations

from specdec_core.base.errors import UserError
from specdec_core.export.llama_cpp import LlamaCpp
from specdec_core.export.server import ExportTarget
from specdec_core.export.sglang import AdaptiveSgLang, SgLang
from specdec_core.export.tensorrt_llm import TensorRtLlm
from specdec_core.export.transformers import Transformers
from specdec_core.export.vllm import Vllm

SERVERS: dict[str, ExportTarget] = {
    server.name: server for server in (Vllm(), SgLang(), TensorRtLlm(), LlamaCpp(), Transformers())
}


# Versions with other settings, which are to be asked for.
LATER: tuple[ExportTarget, ...] = (AdaptiveSgLang(),)


def server_of(name: str, version: str | None = None) -> ExportTarget:
    """The server of a name. Raises :class:`UserError` for an unknown name or version."""
    if name not in SERVERS:
        raise UserError(f"--to {name}: expected one of {', '.join(SERVERS)}")
    if version is None:
        return SERVERS[name]
    servers = [SERVERS[name], *(server for server in LATER if server.name == name)]
    for server in servers:
        if _matches(version, server.known):
            return server
    known = ", ".join(one for server in servers for one in server.known)
    raise UserError(
        f"--version {version}: of {SERVERS[name].title} the settings of {known} are known"
    )


def _matches(version: str, known: tuple[str, ...]) -> bool:
    """A release of a known version, as 0.32.1 of 0.32, counts as that."""
    return any(version == one or version.startswith(f"{one}.") for one in known)
