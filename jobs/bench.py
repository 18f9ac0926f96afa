"""What `specdec bench offline` and `specdec bench serve` share: options, and the way from a plan to
a delivered result."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.choice import read_config
from jobs.console import console, errors, interruptible, point, print_runs_page
from jobs.options import chosen_pair, given
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement

if TYPE_CHECKING:
    from dashboards.sections import Report
    from specdec_core.evidence.bench.benchmark import BenchPlan
    from specdec_core.measure.comparison import Comparison
    from specdec_core.measure.parts import Parts
    from specdec_core.models.pair import Pair
    from specdec_core.prompts.prompt_sets import Prompt, PromptSet
    from specdec_core.servers.server import Mode, Stage

NO_PEERS = "none"

Configs = Annotated[
    list[Path] | None,
    Option(
        help="YAML with `pair` and `configuration` (or the beginning of an id) to add as a row,"
        " and as other servers' with what is exported of it or the plug-in; repeatable; unset,"
        " the champion, if there is one."
    ),
]
BenchRepeats = Annotated[int | None, Option(min=1, help="Times each prompt is decoded.")]
Threads = Annotated[int | None, Option(min=1, help="CPU threads of every contestant.")]
Only = Annotated[
    list[str] | None,
    Option(help="Only rows with this in the name, and this engine without a drafter; repeatable."),
]
Rows = Annotated[
    Path | None, Option(help="YAML with this engine's other rows; unset, the command's own file.")
]
MeasureAgain = Annotated[bool, Option("--fresh", help="Measure again what an interrupted run has.")]


@dataclass(frozen=True)
class BenchRun:
    """A benchmark under way: its runs are kept in `parts` until the result is delivered."""

    pair: Pair  # with the data types that every run uses
    prompts: PromptSet
    our_modes: dict[str, list[Mode]]  # by program, with our settings or plug-in
    parts: Parts[Any]
    facts: dict[str, str]  # the environment


def plan_options(options: Mapping[str, Any], servers: bool, **more: Any) -> dict[str, Any]:
    """The values of a benchmark's plan that the `options` of a command give, by name: the pair, the
    configurations to add for it, prompts and peers; and `more`. `servers`: only peers with one."""
    placed = options.get("cluster") is not None
    spec, chosen = _chosen(options["config"] or [], options["target"], options["draft"], placed)
    base = spec.model_dump(mode="json")
    runner = given(
        **{name: options[name] for name in ("compile", "threads", "max_length")},
        target_dtype=options["dtype"],
        draft_dtype=options["dtype"],
    )
    prompts = given(
        source=options["prompts"], limit=options["limit"], chat_template=options["chat_template"]
    )
    return given(
        pair={**base, "runner": {**base["runner"], **runner}},
        chosen=[configuration.model_dump(mode="json") for configuration in chosen],
        prompts=prompts or None,
        max_new_tokens=options["max_new_tokens"],
        repeats=options["repeats"],
        peers=peers_of(options["peers"], servers),
        only=options["only"] or None,
        **more,
    )


def _chosen(
    config: list[Path], target: str | None, draft: list[str] | None, placed: bool
) -> tuple[PairSpec, list[Configuration]]:
    """The pair of the files, and their configurations, which are added to the plan's; without files
    the champion's, if there is one, if it can be a row (`placed`: the models have devices of their
    own), and if the options name no other pair."""
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
        why = "" if configuration.lossless else "is lossy"
        if configuration.asynchronous and not placed:
            why = "drafts on its own device"
        if why:
            console.print(f"the champion, {configuration.label}, {why}: without its row")
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
    from specdec_core.servers.table import names_of, server_of

    stage: Stage = "serve" if servers else "bench"
    for name in names:
        if name != NO_PEERS:
            server_of(name, stage=stage, option="--peers")
    return [name for name in names_of(stage) if name in names]


@contextmanager
def loaded(
    plan: BenchPlan, limit: int | None, placement: Placement | None = None
) -> Iterator[tuple[Pair, list[Prompt]]]:
    """The plan's pair, on the devices of `placement` if any, and its prompts, at most `limit`."""
    with ExitStack() as held:
        with console.status(f"loading {plan.pair.name}"):
            # Ray, torch and transformers take seconds to import.
            from cluster.placed_engine import loaded_pair
            from specdec_core.drafting.heads.storage import load_card
            from specdec_core.prompts.prompt_sets import load_prompts

            wanted, asked = plan.wanted().values(), plan.prompts
            for configuration in wanted:
                for _, head in configuration.heads:
                    load_card(head)  # a missing head is reported before the models are loaded
            pair = held.enter_context(loaded_pair(plan.pair, placement, wanted))
            prompts = load_prompts(asked.source, limit, pair.tokenizer, asked.chat_template)
        yield pair, prompts


@contextmanager
def measuring(
    plan: BenchPlan,
    folder: Path,
    pair: Pair,
    prompts: Sequence[Prompt],
    name: str | None,
    kind: type[Any],
    fresh: bool,
    **more: Any,
) -> Iterator[BenchRun]:
    """A benchmark that keeps its runs, lists of `kind`. It resumes an interrupted one of the same
    `name`, plan, weights, prompts, environment and `more`, unless `fresh`; its runs are forgotten
    when the block ends. `folder` is the result's."""
    from jobs.bench_exported import our_modes
    from specdec_core.base.environment import environment
    from specdec_core.measure.parts import Parts, described

    facts, modes = environment(), our_modes(plan, pair)
    asked = plan.prompts.described(prompts)
    told = [dict(mode.settings) for own in modes.values() for mode in own]
    what = described(name, plan, plan.weights(pair), asked, told, facts, **more)
    with interruptible(), Parts.open(folder.parent, what, kind, fresh) as parts:
        pair = pair.reloaded(parts.pair(pair.spec))
        yield BenchRun(pair, asked, modes, parts, facts)
        parts.remove()


def deliver(
    result: Comparison[Any], shown: Report, prompts: Sequence[Prompt], folder: Path
) -> None:
    """Write the result and its report into `folder`, log it and show it. What cannot be logged is
    not in `folder` either, so that the same command delivers both. Raises :class:`UserError`."""
    from dashboards.outputs.console import show
    from dashboards.outputs.files import write
    from dashboards.outputs.mlflow_runs import delivering, log
    from specdec_core.base.files import atomic_folder

    with atomic_folder(folder) as place:
        result.save(place)
        write(shown, place)
        with delivering("the runs are kept, and the same command delivers them"):
            log(shown, [place], prompts=(result.prompts, prompts), resume=folder)
    show(console, shown.sections)
    point("report", folder / "report.md")
    print_runs_page(result.pair.name, "benchmarks")


def end(unequal: int) -> None:
    """Exit with code 1 where outputs are not what they must be."""
    if unequal:
        errors.print(
            f"[red]not lossless:[/red] in float32 {unequal} of our rows wrote something else than"
            " autoregressive decoding"
        )
        sys.exit(1)
