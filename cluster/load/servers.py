"""The servers of a comparison under load, each in separate processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import yaml

from cluster.load.comparison import ServerContestant
from cluster.load.cores import Cores
from specdec_core.base.environment import environment
from specdec_core.base.errors import UserError
from specdec_core.base.names import plain_name
from specdec_core.config import distinct_labels
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.result import LoadRow
from specdec_core.measure.comparison import OURS
from specdec_core.models.pair import Pair
from specdec_core.servers.server import Mode, ServedMode, Server

# Each server starts a separate Ray: on another machine's cores it would not be compared. That one
# has neither a job's files, nor a reason to show its actors other GPUs than their own.
_OF_A_JOB = {
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
}


def our_servers(
    plan: LoadPlan, pair: Pair, serve: Sequence[str], cores: Cores, scratch: Path
) -> Iterator[ServerContestant]:
    """`serve`, the command `specdec serve`, under each of the plan's configurations, with the data
    types of `pair`. Its files are in `scratch`, which must last as long as the servers do."""
    facts = environment()
    version = f"specdec {facts.get('specdec', '')} {facts.get('git_commit', '')[:10]}".strip()
    variables = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    names = distinct_labels(configurations := plan.configurations())
    for configuration in configurations:
        name = names[configuration.id]
        content = {"pair": pair.spec, "configuration": configuration}
        file = scratch / f"{configuration.id}.yaml"
        file.write_text(
            yaml.safe_dump({key: value.model_dump(mode="json") for key, value in content.items()})
        )
        # Common prefixes are prefilled for each request, as by the other servers.
        words = [*serve, "--config", str(file), "--fresh", "--no-share-prefixes"]
        if cores.engine:
            words += ["--cores", ",".join(map(str, cores.engine))]
        row = LoadRow(
            name=name,
            group=OURS,
            autoregressive=configuration.drafter is None,
            lossless=configuration.lossless,
            version=version,
            settings=configuration.model_dump(mode="json", exclude_defaults=True),
            configuration=configuration,
        )
        served = ServedMode(version, row.settings, partial(_command, words), variables)
        yield ServerContestant(row, partial(served.process, name))


def _command(words: Sequence[str], slots: int, port: int) -> list[str]:
    return [*words, "--port", str(port), "--slots", str(slots)]


def other_servers(
    server: Server,
    pair: Pair,
    cores: Cores,
    scratch: Path,
    ours: Sequence[Mode],
    warned: Callable[[str], None] | None,
) -> Iterator[ServerContestant]:
    """Another server in each of its modes and in `ours`. Files are in `scratch`, as above. A mode
    that cannot run is `warned` of and left out, and with the first one all modes are. Without
    `warned`, a :class:`UserError` is raised instead, and each mode must start."""
    for number, mode in enumerate([*server.modes(pair, served=True), *ours]):
        try:
            found = mode_server(server, pair, mode, cores, scratch, warned is None)
        except UserError as error:
            if warned is None:
                raise
            warned(f"without {mode.name if number else server.name}: {error}")
            if not number:
                return
        else:
            yield found


def mode_server(
    server: Server,
    pair: Pair,
    mode: Mode,
    cores: Cores,
    scratch: Path,
    needed: bool,
    logs: Path | None = None,
) -> ServerContestant:
    """A server in one mode, as above. What it prints is kept in the folder `logs`, if that is
    given."""
    folder = Path(mkdtemp(prefix=server.name, dir=scratch))
    served = server.served(pair, mode, cores.engine, folder)
    row = LoadRow(
        name=mode.name,
        group=server.name,
        with_ours=mode.with_ours,
        autoregressive=mode.autoregressive,
        version=served.version,
        settings=served.settings,
    )
    log = None if logs is None else logs / f"{plain_name(mode.name)}.log"
    return ServerContestant(row, partial(served.process, mode.name, log=log), needed)
