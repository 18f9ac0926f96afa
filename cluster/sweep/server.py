"""A sweep of a server: its settings ranked by replay at each load, and raced in the server.

The recording is found, or made of the answers of the server itself. The costs of the server's steps
are found, or measured in it. The simulation of every setting at every number of clients chooses the
finalists. The server is started with each of them, and in its own modes, and they answer the same
requests under each load. These first runs show what a round takes longer while the server serves,
which corrects the simulation and the choice. Then all that may win answer interleaved. Where
different lengths are best at different loads, the table of lengths by load is raced as well. The
target's weights are loaded by the server alone.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.load.cores import Cores
from cluster.sweep.run import pair_of
from cluster.sweep.server_stages import LEAST, LOGS, ServerStages
from specdec_core.base.environment import machine
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.base.workspace import remember
from specdec_core.config import Sampling
from specdec_core.drafting.trained import weights_here
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.server_choice import ServerSweep
from specdec_core.models.pair import check_pair
from specdec_core.prompts.prompt_sets import Prompt, load_prompts
from specdec_core.search.folder import SweepFolder
from specdec_core.search.plan import ResolvedPlan
from specdec_core.search.replaying import (
    fitting_recording,
    load_heads,
    recording_of,
    with_types_of,
)
from specdec_core.servers.answers import served_layers, served_pair
from specdec_core.servers.model_files import placed
from specdec_core.servers.server import Server


def run_server_sweep(
    plan: ResolvedPlan,
    server: Server,
    home: Path,
    command: str,
    name: str | None = None,
    fresh: bool = False,
    observer: Observer | None = None,
) -> tuple[ServerSweep, SweepFolder, list[Prompt]]:
    """Run `plan` in a server, or resume the interrupted run; folders are as of
    :func:`cluster.sweep.run.run_sweep`. The plan's profile, if it has one, is the costs of the
    server's steps. Returns the result, its folder, and the prompts of the race.

    Raises :class:`UserError` for bad input, before anything is started.
    """
    observer = observer or Observer()
    race = race_plan(plan, server)
    if (reason := server.missing({})) is not None:
        raise UserError(f"{server.title}: {reason}")
    cores = Cores.divide(plan.pair.runner.threads)
    tokenizer = check_pair(plan.pair, served=True)
    asked = plan.prompts
    recorded = asked.described(asked.load(tokenizer))
    race, prompts, others_raced = _raced(plan, race, recorded.count, tokenizer, observer)
    weights = weights_here(plan.pair, plan.samples)
    # Heads, states and tables that are missing or do not fit the pair are refused before anything.
    for configuration in plan.samples:
        placed(configuration)
    if weights is not None:
        load_heads(plan.samples, plan.pair, weights)
    identity = f"{server.name} {plan.digest(recorded.digest)}"
    identity = hashlib.sha256(identity.encode()).hexdigest()
    name = name or f"{plan.pair.name}-{server.name}-{identity[:8]}"
    folder = SweepFolder.claim(home / "sweeps", name, identity, fresh)
    folder.check_weights(weights)
    if (done := folder.result(ServerSweep)) is not None:
        return done, folder, prompts
    recording = recording_of(plan, home, recorded.digest)
    recording = recording or fitting_recording(plan, home, recorded.digest)
    if recording is not None:
        recording.check(weights or {})
    in_types = pair_of(plan, folder, recording)
    if with_types_of(recording, in_types) != in_types:
        recording = None  # made since the sweep began, in other data types
    # A server that does not give what the drafts read is refused before it is started.
    layers = served_layers(plan.pair) if recording is None else ()
    answering = server.answering(layers)
    pair = served_pair(in_types)
    race = race.model_copy(update={"pair": pair.spec})
    with ExitStack() as held:
        scratch = Path(held.enter_context(TemporaryDirectory()))
        sweep = ServerStages(
            plan, race, server, pair, folder, cores, prompts, command, observer, scratch
        )
        expressed = sweep.express(plan.configurations or ())
        held.enter_context(folder.lock())
        remember(home)
        if plan.profile is None:  # races begin anew on another machine, the steps' costs are kept
            folder.keep_machine(machine())
        folder.begin(plan.given, identity)
        folder.save_pair(pair.spec)
        (folder.path / LOGS).mkdir(exist_ok=True)
        recording = recording or sweep.record(home, answering)
        # The server may have fetched the target just now.
        weights = weights_here(plan.pair, plan.samples)
        folder.keep_weights(weights or recording.header.fingerprints)
        profile = sweep.profile(recording)
        result = sweep.run(recording, profile, expressed)
        result.others_raced = others_raced
        result.save(folder.path)
        for parts in sweep.kept:
            parts.remove()
    return result, folder, prompts


def _raced(
    plan: ResolvedPlan, race: LoadPlan, recorded: int, tokenizer: Any, observer: Observer
) -> tuple[LoadPlan, list[Prompt], bool]:
    """The prompts of the race: those after the ones that are recorded, where there are enough, else
    the first ones; and whether they are other ones. A started server answers all loads, if there
    are enough prompts to send none of them twice."""
    # Else it is started for each, with the same slots: vLLM compiles anew for another number.
    race = race.model_copy(update={"slots": max(race.clients)})
    asked, whole = plan.prompts, race.model_copy(update={"one_server": True})
    found = load_prompts(asked.source, recorded + whole.needed, tokenizer, asked.chat_template)
    fitting = [
        (each, prompts[: each.needed], prompts is not found)
        for prompts in (found[recorded:], found)
        for each in (whole, race)
        if len(prompts) >= each.needed
    ]
    raced, prompts, others_raced = next(iter(fitting), (race, found, False))
    if fitting and raced is race and len(race.loads) > 1:
        observer.warned(
            f"{asked.source}: {len(found)} prompts, so every server is started anew for each load;"
            f" with {recorded + whole.needed} it would be started once for all"
        )
    return raced, prompts, others_raced


def race_plan(plan: ResolvedPlan, server: Server) -> LoadPlan:
    """The race of a sweep's finalists. Raises :class:`UserError` for a plan that a server cannot
    be swept by."""
    workload = plan.workload
    if workload is None or workload.clients is None:
        raise UserError("a server is swept at numbers of clients: give --clients, as 1,4,8")
    if plan.configurations is None:
        raise UserError("method optuna: a server's settings are ranked as a grid or at random")
    if plan.sampling != Sampling():
        raise UserError(f"sampling: {server.title} is compared greedily, without penalties")
    if workload.slo is not None:
        raise UserError("workload.slo: a server's settings are compared by their tokens a second")
    if plan.cluster is not None:
        raise UserError("--cluster: a server is timed where it runs, here")
    if plan.profile is not None and not plan.profile.proposals:
        raise UserError(
            "profile: of this engine, but a server's steps cost otherwise: make one with"
            " `specdec profile --engine`"
        )
    race = LoadPlan(
        pair=plan.pair,
        prompts=plan.prompts,
        max_new_tokens=plan.max_new_tokens,
        clients=tuple(sorted(workload.clients)),
        requests=plan.live.requests and max(plan.live.requests, *workload.clients),
        least=LEAST,
        repeats=plan.live.repeats,
        peers=(server.name,),
    )
    race.check()
    return race
