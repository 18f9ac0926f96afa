"""Other programs with what `specdec export` gives them, as rows of `specdec bench`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from jobs.console import console
from jobs.export import by_replay, models_for, say_nearest
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, distinct_labels
from specdec_core.servers.server import Mode, Server
from specdec_core.servers.table import server_of

if TYPE_CHECKING:
    from specdec_core.evidence.bench.benchmark import BenchPlan
    from specdec_core.models.pair import Pair


def our_modes(plan: BenchPlan, pair: Pair) -> dict[str, list[Mode]]:
    """By program, its modes with our plug-in, for each of the plan's `plug_ins`. A program that
    serves over HTTP also has two modes for each of the plan's whole configurations, as a champion:
    with the exported settings and with the plug-in. Programs that are not installed have none. A
    mode that is impossible is left out with a line."""
    modes: dict[str, list[Mode]] = {}
    plug_ins, chosen = plan.plugged_in(), [c for c in plan.chosen if c.drafter is not None]
    named, labels = distinct_labels(plug_ins), distinct_labels(plan.chosen)
    for name in plan.peers:
        server = server_of(name, stage="bench", option="--peers")
        if server.missing({}) is not None:
            continue
        own = modes[name] = []
        for configuration in plug_ins:
            own += _plugged_in(server, configuration, pair, plan, named[configuration.id])
        for configuration in chosen if "serve" in server.stages else ():
            label = labels[configuration.id]
            own += _exported(server, configuration, pair, plan, label)
            if configuration.id not in named:
                own += _plugged_in(server, configuration, pair, plan, label)
    return modes


def _exported(
    server: Server, configuration: Configuration, pair: Pair, plan: BenchPlan, label: str
) -> list[Mode]:
    """The mode with the settings that `specdec export` writes; none if these draft nothing."""
    name = f"{server.title} with our export, {label}"
    if not plan.wants(name):
        return []
    from specdec_core.search.nearest import counterpart_or_nearest

    try:
        models = models_for(pair.spec, server)
        find = partial(by_replay, pair=pair.spec, configuration=configuration)
        counterpart, nearest = counterpart_or_nearest(server, models, configuration, find)
    except UserError as error:
        return _without(server, "export", str(error))
    if nearest is not None:
        say_nearest(server, configuration.drafter, nearest)
    if not counterpart.settings:
        return _without(server, "export", f"it drafts nothing, like {server.title} alone")
    if (reason := server.missing(counterpart.settings)) is not None:
        return _without(server, "export", reason)
    draft = configuration.draft_of(models.drafts)
    return [Mode(name, counterpart.settings, draft, with_ours=True)]


def _plugged_in(
    server: Server, configuration: Configuration, pair: Pair, plan: BenchPlan, label: str
) -> list[Mode]:
    name = f"{server.title} with our plug-in, {label}"
    if not plan.wants(name):
        return []
    if configuration.unpriced and not server.measures:
        from specdec_core.engine import Engine

        configuration = Engine(pair).priced(configuration)
    drafts = configuration.drafts_of(pair.spec.drafts)
    try:
        server.check_plug_in(configuration, list(drafts.values()))
    except UserError as error:
        return _without(server, "plug-in", str(error))
    return [server.plug_in_mode(configuration, name)]


def _without(server: Server, what: str, reason: str) -> list[Mode]:
    console.print(f"without {server.title} with our {what}: {reason}", soft_wrap=True)
    return []
