"""The servers of a comparison under load: this engine's and vLLM's, each in its own processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from cluster.load_comparison import Contestant
from cluster.serving.server_process import Cores, Server, ServerProcess
from specdec_core.base.environment import environment
from specdec_core.config import distinct_labels
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.result import LoadRow
from specdec_core.evidence.peers.vllm import VllmMode
from specdec_core.evidence.peers.vllm_server import VllmServer, vllm_servers
from specdec_core.measure.comparison import OURS
from specdec_core.models.pair import Pair

VLLM = "vllm"


def our_servers(
    plan: LoadPlan, pair: Pair, serve: Sequence[str], cores: Cores, scratch: Path
) -> Iterator[Contestant]:
    """`serve`, the command `specdec serve`, under each of the plan's configurations, with the data
    types of `pair`. Its files are in `scratch`, which must last as long as the servers do."""
    facts = environment()
    version = f"specdec {facts.get('specdec', '')} {facts.get('git_commit', '')[:10]}".strip()
    # A Ray of each server's own: on another machine's cores it would not be compared.
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    names = distinct_labels(configurations := plan.configurations())
    for configuration in configurations:
        name = names[configuration.id]
        content = {"pair": pair.spec, "configuration": configuration}
        file = scratch / f"{configuration.id}.yaml"
        file.write_text(
            yaml.safe_dump({key: value.model_dump(mode="json") for key, value in content.items()})
        )
        # Common prefixes are prefilled for each request, as by the other servers.
        options = ["--config", str(file), "--fresh", "--no-share-prefixes", "--no-track"]
        if cores.engine:
            options += ["--cores", ",".join(map(str, cores.engine))]
        row = LoadRow(
            name=name,
            group=OURS,
            autoregressive=configuration.drafter is None,
            lossless=configuration.lossless,
            version=version,
            settings=configuration.model_dump(mode="json", exclude_defaults=True),
            configuration=configuration,
        )

        def server(slots: int, name: str = name, options: Sequence[str] = options) -> Server:
            return ServerProcess(
                name,
                lambda port: [*serve, *options, "--port", str(port), "--slots", str(slots)],
                variables,
            )

        yield Contestant(row, server)


def vllm_contestants(
    pair: Pair, cores: Cores, needed: bool, scratch: Path, ours: Sequence[VllmMode] = ()
) -> Iterator[Contestant]:
    """vLLM's server in each of its modes and in `ours`; with `needed`, each must start. Their files
    are in `scratch`, as above. Raises :class:`UserError` where vLLM is not installed."""
    for number, vllm in enumerate(vllm_servers(pair, ours=ours)):
        folder = scratch / f"vllm-{number}"
        folder.mkdir()
        variables = vllm.environment(cores.engine, folder)
        row = LoadRow(
            name=vllm.name,
            group=VLLM,
            with_ours=vllm.mode.with_ours,
            autoregressive=vllm.mode.speculative is None,
            version=vllm.version,
            settings=vllm.settings(1),
        )

        def server(
            slots: int, vllm: VllmServer = vllm, variables: dict[str, str] = variables
        ) -> Server:
            return ServerProcess(vllm.name, lambda port: vllm.command(slots, port), variables)

        yield Contestant(row, server, needed)
