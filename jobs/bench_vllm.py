"""vLLM with what `specdec export` gives it, as rows of `specdec bench offline`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from jobs.console import console
from jobs.export import by_replay, models_for, say_nearest
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, distinct_labels

if TYPE_CHECKING:
    from specdec_core.evidence.bench.benchmark import BenchPlan
    from specdec_core.evidence.peers.vllm import VllmMode
    from specdec_core.models.pair import Pair


def our_modes(plan: BenchPlan, pair: Pair) -> list[VllmMode]:
    """vLLM with the plug-in that drafts by each of the plan's `plug_ins`; and for each of its whole
    configurations, as a champion, with the settings that are exported of it, and with the plug-in.
    None where vLLM is not installed or not asked for. What vLLM cannot be told, or the plug-in not
    draft by, is left out with a line."""
    from specdec_core.evidence.peers.vllm import environment_folder, exported, plug_in

    python = environment_folder() / "bin" / "python"
    if "vllm" not in plan.peers or not python.exists():
        return []
    modes: list[VllmMode] = []
    named = distinct_labels(plug_ins := plan.plugged_in())
    for configuration in plug_ins:
        if plan.wants(plug_in(configuration, named[configuration.id]).label):
            modes += _plugged_in(configuration, pair, named[configuration.id])
    labels, elsewhere = distinct_labels(plan.chosen), {each.id for each in plug_ins}
    for configuration in plan.chosen:
        if configuration.drafter is None:
            continue
        label = labels[configuration.id]
        if plan.wants(exported({}, label).label):
            modes += _exported(configuration, pair, label)
        if configuration.id not in elsewhere and plan.wants(plug_in(configuration, label).label):
            modes += _plugged_in(configuration, pair, label)
    return modes


def _exported(configuration: Configuration, pair: Pair, label: str) -> list[VllmMode]:
    """The mode that `specdec export --to vllm` would write; none where that is to draft nothing."""
    from specdec_core.evidence.peers.vllm import SUFFIX, environment_folder, exported, has_suffix
    from specdec_core.export.nearest import told
    from specdec_core.export.vllm import NEEDS_ARCTIC, Vllm

    server = Vllm()
    try:
        models = models_for(pair.spec, server)
        find = partial(by_replay, pair=pair.spec, configuration=configuration)
        counterpart, nearest = told(server, models, configuration, find)
    except UserError as error:
        console.print(f"without vLLM with our export: {error}", soft_wrap=True)
        return []
    if nearest is not None:
        say_nearest(server, configuration.drafter, nearest)
    mode = exported(counterpart.settings, label)
    if not mode.speculative:
        console.print("without vLLM with our export: it drafts nothing, as vLLM alone")
        return []
    assert SUFFIX.speculative is not None
    if mode.speculative["method"] == SUFFIX.speculative["method"] and not has_suffix(
        environment_folder()
    ):
        console.print(f"without vLLM with our export: it {NEEDS_ARCTIC}", soft_wrap=True)
        return []
    return [mode]


def _plugged_in(configuration: Configuration, pair: Pair, label: str) -> list[VllmMode]:
    from specdec_core.engine import Engine
    from specdec_core.evidence.peers.vllm import plug_in
    from specdec_core.plugins import vllm

    if configuration.unpriced:
        configuration = Engine(pair).priced(configuration)
    drafts = configuration.drafts_of(pair.spec.drafts)
    try:
        vllm.check(configuration, list(drafts.values()))
    except UserError as error:
        console.print(f"without vLLM with our plug-in: {error}", soft_wrap=True)
        return []
    return [plug_in(configuration, label)]
