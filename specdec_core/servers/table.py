"""The table of servers."""

from __future__ import annotations

from specdec_core.base.errors import UserError
from specdec_core.servers.llama_cpp.server import LlamaCpp
from specdec_core.servers.server import Server, Stage
from specdec_core.servers.sglang.server import SgLang
from specdec_core.servers.tensorrt_llm.server import TensorRtLlm
from specdec_core.servers.transformers.server import Transformers
from specdec_core.servers.vllm.server import Vllm

# By the names that options take.
SERVERS: dict[str, Server] = {
    server.name: server for server in (Vllm(), SgLang(), TensorRtLlm(), LlamaCpp(), Transformers())
}

# Why a server takes no part in a stage.
LACKS: dict[Stage, str] = {
    "plug_in": "there is no plug-in of this library for it",
    "bench": "this library does not run it",
    "serve": "it has no server that this library starts",
    "profile": "this library does not time its steps",
}


def names_of(stage: Stage) -> tuple[str, ...]:
    """The servers that take part in a stage, in the order of benchmarks."""
    return tuple(sorted(name for name, server in SERVERS.items() if stage in server.stages))


def server_of(
    name: str, version: str | None = None, stage: Stage | None = None, option: str = "--to"
) -> Server:
    """The server of a name, which `option` gave. Raises :class:`UserError` for an unknown name, a
    version with unknown settings, and a server that takes no part in the stage."""
    if name not in SERVERS:
        raise UserError(f"{option} {name}: expected one of {', '.join(SERVERS)}")
    server = SERVERS[name]
    # A release of the known version, as 0.32.1 of 0.32, counts as that version.
    if version is not None and not f"{version}.".startswith(f"{server.version}."):
        raise UserError(
            f"--version {version}: of {server.title} the settings of {server.version} are known"
        )
    if stage is not None and stage not in server.stages:
        raise UserError(f"{option} {name}: {LACKS[stage]}; possible: {', '.join(names_of(stage))}")
    return server
