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
    plug_ins, chosen = plan.plugged_in(), [c for c in plan.chosen if c.drafter is not None]
    named, labels = distinct_labels(plug_ins), distinct_labels(plan.chosen)
    modes: dict[str, list[Mode]] = {}
    for program in plan.peers:
        server = server_of(program)
        if server.missing({}) is not None:
            continue
        wanted = []
        if "plug_in" in server.stages:
            wanted = [(_plugged_in, "plug-in", each, named[each.id]) for each in plug_ins]
        for each in chosen if "serve" in server.stages else ():
            wanted.append((_exported, "export", each, labels[each.id]))
            if "plug_in" in server.stages and each.id not in named:
                wanted.append((_plugged_in, "plug-in", each, labels[each.id]))
        own = modes[program] = []
        for mode_of, what, configuration, label in wanted:
            name = f"{server.title} with our {what}"
            if plan.wants(f"{name}, {label}"):
                try:
                    own.append(mode_of(server, configuration, pair, f"{name}, {label}"))
                except UserError as error:
                    console.print(f"without {name}: {error}", soft_wrap=True)
    return modes


def _exported(server: Server, configuration: Configuration, pair: Pair, name: str) -> Mode:
    """The mode with the settings that `specdec export` writes. Raises :class:`UserError` where
    there are none."""
    from specdec_core.search.nearest import counterpart_or_nearest

    models = models_for(pair.spec, server)
    find = partial(by_replay, pair=pair.spec, configuration=configuration)
    counterpart, nearest = counterpart_or_nearest(server, models, configuration, find)
    if nearest is not None:
        say_nearest(server, configuration.drafter, nearest)
    if not counterpart.settings:
        raise UserError(f"it drafts nothing, like {server.title} alone")
    if (reason := server.missing(counterpart.settings)) is not None:
        raise UserError(reason)
    draft = configuration.draft_of(models.drafts)
    return Mode(name, counterpart.settings, draft, with_ours=True)


def _plugged_in(server: Server, configuration: Configuration, pair: Pair, name: str) -> Mode:
    """The mode with our plug-in. Raises :class:`UserError` for a configuration that it does not
    take."""
    if configuration.unpriced and not server.measures:
        from specdec_core.engine import Engine

        configuration = Engine(pair).priced(configuration)
    drafts = models_for(pair.spec, server, plug_in=True).drafts
    server.check_plug_in(configuration, configuration.drafts_of(drafts).values())
    return server.plug_in_mode(configuration, name)
