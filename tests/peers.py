"""The modes of other programs, for tests that decode with them."""

import pytest

from specdec_core.models.pair import Pair
from specdec_core.servers.peer import Peer
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm.process import VENV

vllm_installed = pytest.mark.skipif(
    not (VENV / "bin" / "python").exists(), reason="vLLM is not installed; `make bench-peers` does"
)


def peers_of(pair: Pair, program: str) -> list[Peer]:
    """A program in each of its modes, not yet open."""
    server = SERVERS[program]
    return server.peers(pair, server.modes(pair))
