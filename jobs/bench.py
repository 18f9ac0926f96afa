"""What `specdec bench offline` and `specdec bench serve` share."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.choice import read_config
from jobs.console import console, errors
from jobs.options import check_name, chosen_pair, given
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec

if TYPE_CHECKING:
    from specdec_core.evidence.bench.benchmark import BenchPlan

NOBODY = "none"

Configs = Annotated[
    list[Path] | None,
    Option(
        help="YAML with `pair` and `configuration` (or the beginning of an id) to add as a row,"
        " and as vLLM's with what is exported of it and with the plug-in; repeatable; unset,"
        " the champion, if there is one."
    ),
]
BenchRepeats = Annotated[int | None, Option(min=1, help="Times each prompt is decoded.")]
Peers = Annotated[
    list[str] | None,
    Option(help="transformers, vllm or none; repeatable; unset, all that are installed."),
]
Graphs = Annotated[
    bool | None,
    Option(
        "--compile/--no-compile",
        help="Compiled graphs for this engine, made at the first start; unset, as in the pair.",
    ),
]
Threads = Annotated[int | None, Option(min=1, help="CPU threads of every contestant.")]
Only = Annotated[
    list[str] | None,
    Option(help="Only what has this in its name, and this engine without a drafter; repeatable."),
]
MeasureAgain = Annotated[bool, Option("--fresh", help="Measure again what an interrupted run has.")]


def pair_and_options(
    config: list[Path] | None,
    target: str | None,
    draft: list[str] | None,
    runner: dict[str, Any],
    **others: Any,
) -> dict[str, Any]:
    """What the options say of a benchmark's plan: the pair, under `runner`, the configurations to
    add for it, and `others` that were given."""
    spec, chosen = _chosen(config or [], target, draft)
    base = spec.model_dump(mode="json")
    return given(
        pair={**base, "runner": {**base["runner"], **runner}},
        chosen=[configuration.model_dump(mode="json") for configuration in chosen],
        **others,
    )


def end(unequal: int) -> None:
    """Exit with code 1 where outputs are not what they must be."""
    if unequal:
        errors.print(
            f"[red]not lossless:[/red] in float32 {unequal} of our rows wrote something else than"
            " autoregressive decoding"
        )
        sys.exit(1)


def result_folder(name: str | None, plan: BenchPlan) -> Path:
    """The folder of the result. Raises :class:`UserError` where it exists."""
    check_name(name)
    name = name or f"{plan.pair.name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = workspace() / "bench" / name
    if folder.exists():
        raise UserError(f"{folder} exists: give another --name")
    return folder


def _chosen(
    config: list[Path], target: str | None, draft: list[str] | None
) -> tuple[PairSpec, list[Configuration]]:
    """The pair, and the configurations to add for it: those of the files, else the champion, if
    there is one and the options name no other pair."""
    if config:
        choices = [read_config(path, check=False)[0] for path in config]
        spec = choices[0].pair
        for path, choice in zip(config, choices, strict=True):
            if choice.pair != spec:
                raise UserError(f"{path}: another pair than {config[0]}'s; one run is for one pair")
            changed = {"pair": chosen_pair(spec, target, draft)}
            choice.model_copy(update=changed).check(str(path))
    elif target is None and not draft:
        from dashboards.tracking.registry import find_champion  # MLflow takes seconds to import

        if (champion := find_champion()) is None:
            console.print("no champion yet (`specdec sweep` finds one): without its row")
            return PairSpec(), []
        spec, configuration, version = champion
        if not configuration.lossless:
            console.print(f"the champion, {configuration.label}, is lossy: without its row")
            return spec, []
        console.print(f"champion  {configuration.label}, version {version}", soft_wrap=True)
        return spec, [configuration]
    else:
        spec, choices = PairSpec(), []
    return chosen_pair(spec, target, draft), [choice.configuration for choice in choices]


def peers_of(names: list[str] | None, servers: bool) -> list[str] | None:
    """The peers to compare with; of `servers`, those that have one."""
    if names is None:
        return None
    from specdec_core.evidence.peers.choose import NAMES

    if servers and "transformers" in names:
        raise UserError("--peers transformers: it has no server to compare; under load, vllm")
    for name in names:
        if name not in (*NAMES, NOBODY):
            raise UserError(f"--peers {name}: expected {', '.join(NAMES)} or {NOBODY}")
    return [name for name in NAMES if name in names]


def merged(under: dict, over: dict) -> dict:
    """`over` on top of `under`, a mapping key by key."""
    both = {k: {**under[k], **over[k]} for k in under if isinstance(over.get(k), dict)}
    return {**under, **over, **both}
