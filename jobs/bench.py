"""Time this engine against what people use instead, on the same prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.choice import read_config
from jobs.console import (
    console,
    errors,
    interruptible,
    point,
    print_runs_page,
    run,
    typed,
)
from jobs.options import (
    Drafts,
    DType,
    MaxLength,
    MaybeChatTemplate,
    MaybeLimit,
    MaybePrompts,
    MaybeTokens,
    Name,
    Target,
    check_name,
    chosen_pair,
    given,
    numbers,
    sizes,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec
from specdec_core.search.load.workload import Slo

if TYPE_CHECKING:
    from specdec_core.models.pair import Pair
    from specdec_core.prompts.prompt_sets import Prompt
    from specdec_core.studies.bench.benchmark import BenchPlan
    from specdec_core.studies.bench.result import BenchResult, Take
    from specdec_core.studies.parts import Parts
    from specdec_core.studies.peers.vllm import VllmMode

ROWS = Path(__file__).with_name("bench.yaml")
QUICK = {"max_new_tokens": 32, "repeats": 1, "prompts": {"limit": 4}}
NOBODY = "none"


def main(
    config: Annotated[
        list[Path] | None,
        Option(
            help="YAML with `pair` and `configuration` (or the beginning of an id) to add as a row,"
            " and as vLLM's with what is exported of it and with the plug-in; repeatable; unset,"
            " the champion, if there is one."
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        Option(
            help="YAML with this engine's other rows; unset, jobs/bench.yaml, under load"
            " jobs/bench_load.yaml."
        ),
    ] = None,
    target: Target = None,
    draft: Drafts = None,
    prompts: MaybePrompts = None,
    chat_template: MaybeChatTemplate = None,
    limit: MaybeLimit = None,
    max_new_tokens: MaybeTokens = None,
    max_length: MaxLength = None,
    repeats: Annotated[int | None, Option(min=1, help="Times each prompt is decoded.")] = None,
    temperature: Annotated[
        list[float] | None, Option(help="0 is greedy; repeatable, each is a race.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        Option(help="transformers, vllm or none; repeatable; unset, all that are installed."),
    ] = None,
    compile: Annotated[
        bool | None,
        Option(
            "--compile/--no-compile",
            help="Compiled graphs for this engine, made at the first start; unset, as in the pair.",
        ),
    ] = None,
    threads: Annotated[int | None, Option(min=1, help="CPU threads of every contestant.")] = None,
    dtype: DType = None,
    baseline: Annotated[
        Path | None,
        Option(help="Spec-Bench answer file to compare its tasks' speeds with."),
    ] = None,
    clients: Annotated[
        str | None,
        Option(
            help="Clients that wait for their answers, as 1,4,8,16: compare the servers over HTTP"
            " under load instead, ours and vLLM's."
        ),
    ] = None,
    rate: Annotated[
        str | None,
        Option(
            help="Requests a second, as 2,4.5, that come at random whether or not earlier ones are"
            " answered: the same, with or without --clients."
        ),
    ] = None,
    slo: Annotated[
        str | None,
        Option(
            help="Under load: limits in seconds, as ttft=0.5,tpot=0.05; requests within them count"
            " for goodput."
        ),
    ] = None,
    seed: Annotated[int | None, Option(min=0, help="With --rate: of the arrival times.")] = None,
    requests: Annotated[
        int | None,
        Option(
            min=1,
            help="Under load: requests to a server; unset, 24, or 3 for each client if that is"
            " more, and 64 at a rate.",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        Option(
            min=1,
            help="Under load: requests that a server decodes together; unset, as many as there"
            " are clients, and 16 at a rate.",
        ),
    ] = None,
    engine_alone: Annotated[
        bool,
        Option(
            "--engine-alone",
            help="Under load: measure this engine without a server, too, and say what HTTP costs.",
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        Option(
            help="Only what has this in its name, and this engine without a drafter; repeatable."
        ),
    ] = None,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="A first look: 4 prompts (under load 8 requests, or 2 for each client, and 16 at a"
            " rate), 32 new tokens, once.",
        ),
    ] = False,
    name: Name = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Measure again what an interrupted run has.")
    ] = False,
) -> None:
    """Decode the same prompts with this engine, transformers and vLLM, in turns. Report who is how
    much faster, whether all write what the model alone would write, and how close this engine
    comes to the physical limit. With --clients or --rate, compare servers under load: tokens a
    second, time to the first token, time per token. Interrupted, the same command resumes, with the
    repeat or server that it was at. Run it on an otherwise idle machine."""
    load = _load_options(clients, rate, slo, seed, requests, slots, engine_alone)
    if load is not None:
        _check_together(temperature, baseline)
    spec, chosen = _chosen(config or [], target, draft)
    runner = given(
        compile=compile,
        threads=threads,
        target_dtype=dtype,
        draft_dtype=dtype,
        max_length=max_length,
    )
    base = spec.model_dump(mode="json")
    options = given(
        pair={**base, "runner": {**base["runner"], **runner}},
        prompts=given(source=prompts, limit=limit, chat_template=chat_template) or None,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        temperatures=temperature or None,
        peers=_peers(peers, load is not None),
        chosen=[configuration.model_dump(mode="json") for configuration in chosen],
        only=only or None,
    )
    if load is not None:
        _under_load(rows, {**options, **load}, quick, name, peers is not None, fresh)
        return
    # torch and transformers take seconds to import.
    from jobs.bench_vllm import our_modes
    from specdec_core.base.environment import environment
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import PromptSet
    from specdec_core.studies.bench.benchmark import load_bench_plan
    from specdec_core.studies.bench.result import Take
    from specdec_core.studies.parts import Parts, described

    plan = load_bench_plan(rows or ROWS, **_merged(QUICK if quick else {}, options))
    folder = _folder(name, plan)
    pair, loaded, answers = _load(plan, baseline)
    ours = our_modes(plan, pair)
    asked = PromptSet.of(plan.prompts.source, loaded, plan.prompts.chat_template)
    told = [mode.speculative for mode in ours]
    what = described(name, plan, plan.weights(pair), asked, told, environment())
    with interruptible(), Parts.open(folder.parent, what, Take, fresh) as parts:
        if (kept := parts.pair(pair.spec)) != pair.spec:
            pair = load_pair(kept)
        result = _race(plan, loaded, pair, ours, peers is not None, folder.name, parts)
        _deliver(result, pair, loaded, answers, folder)
        parts.remove()
    _end(len(result.unequal()))


def _under_load(
    rows: Path | None,
    options: dict[str, Any],
    quick: bool,
    name: str | None,
    explicit: bool,
    fresh: bool,
) -> None:
    """The comparison of servers."""
    from jobs import bench_load
    from specdec_core.studies.bench.benchmark import read_bench_plan
    from specdec_core.studies.load.plan import LoadPlan

    under = bench_load.QUICK if quick else {}
    plan = read_bench_plan(LoadPlan, rows or bench_load.ROWS, **_merged(under, options))
    folder = _folder(name, plan)
    result = bench_load.bench_load(plan, folder, name, typed("bench"), explicit, fresh)
    _end(len(result.unequal()))


def _end(unequal: int) -> None:
    """Exit with code 1 where outputs are not what they must be."""
    if unequal:
        errors.print(
            f"[red]not lossless:[/red] in float32 {unequal} of our rows wrote something else than"
            " autoregressive decoding"
        )
        sys.exit(1)


def _load_options(
    clients: str | None,
    rate: str | None,
    slo: str | None,
    seed: int | None,
    requests: int | None,
    slots: int | None,
    engine_alone: bool,
) -> dict[str, Any] | None:
    """What the options say of a load; None where they name none. Raises :class:`UserError` for
    those that need one."""
    if clients is None and rate is None:
        alone = given(slo=slo, seed=seed, requests=requests, slots=slots)
        alone |= given(engine_alone=engine_alone or None)
        if alone:
            name = next(iter(alone)).replace("_", "-")
            raise UserError(f"--{name} needs --clients or --rate")
        return None
    if seed is not None and rate is None:
        raise UserError("--seed needs --rate: with --clients nothing comes at random")
    rates = numbers(rate, "--rate", float) if rate is not None else ()
    if not all(0 < value < float("inf") for value in rates):
        raise UserError(f"--rate {rate}: expected requests a second as 2,4.5")
    objective = Slo.read(slo, "--slo").model_dump(exclude_none=True) if slo is not None else None
    return {
        "clients": sizes(clients, "--clients") if clients is not None else (),
        "rates": rates,
        **given(slo=objective, seed=seed, requests=requests, slots=slots),
        "engine_alone": engine_alone,
    }


def _check_together(temperature: list[float] | None, baseline: Path | None) -> None:
    """Raises :class:`UserError` for options of the other benchmark."""
    of_race = given(temperature=temperature or None, baseline=baseline)
    if of_race:
        raise UserError(
            f"--{next(iter(of_race))} does not go with --clients or --rate: servers are compared"
            " greedily, by their speed"
        )


def _folder(name: str | None, plan: BenchPlan) -> Path:
    """The folder of the result. Raises :class:`UserError` where it exists."""
    check_name(name)
    name = name or f"{plan.pair.name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = workspace() / "bench" / name
    if folder.exists():
        raise UserError(f"{folder} exists: give another --name")
    return folder


def _load(
    plan: BenchPlan, baseline: Path | None
) -> tuple[Pair, list[Prompt], list[dict[str, Any]] | None]:
    """The pair, the prompts, and the answers to compare with."""
    with console.status(f"loading {plan.pair.name}"):
        # torch and transformers take seconds to import.
        from specdec_core.drafting.heads.storage import load_card
        from specdec_core.models.pair import load_pair
        from specdec_core.prompts.prompt_sets import load_prompts
        from specdec_core.studies.bench.spec_bench import read_answers

        for configuration in plan.wanted().values():
            for _, head in configuration.heads:
                load_card(head)  # one that is missing is said before the models are loaded
        answers = read_answers(baseline) if baseline is not None else None
        pair = load_pair(plan.pair)
        asked = plan.prompts
        loaded = load_prompts(asked.source, asked.limit, pair.tokenizer, asked.chat_template)
        return pair, loaded, answers


def _race(
    plan: BenchPlan,
    prompts: list[Prompt],
    pair: Pair,
    ours: Sequence[VllmMode],
    explicit: bool,
    name: str,
    parts: Parts[Take],
) -> BenchResult:
    from dashboards.progress import RaceProgress
    from specdec_core.studies.bench.benchmark import open_peers, run_bench

    with (
        RaceProgress(console) as progress,
        open_peers(plan, pair, explicit, progress, ours) as others,
    ):
        return run_bench(plan, prompts, pair, others, name, typed("bench"), progress, parts)


def _deliver(
    result: BenchResult,
    pair: Pair,
    prompts: list[Prompt],
    answers: list[dict[str, Any]] | None,
    folder: Path,
) -> None:
    """Write the result whole or not at all, log it and show it."""
    from dashboards.outputs.console import show
    from dashboards.outputs.files import write
    from dashboards.outputs.mlflow_runs import log
    from dashboards.reports.bench import report
    from specdec_core.base.files import atomic_folder
    from specdec_core.studies.bench.spec_bench import write_answers

    def decode(tokens: list[int]) -> str:
        return str(pair.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    shown = report(result, answers)
    with atomic_folder(folder) as place:
        result.save(place)
        write(shown, place)
        write_answers(result, place, decode)
    log(shown, [folder], prompts=(result.prompts, prompts))
    show(console, shown.sections)
    point("report", folder / "report.md")
    print_runs_page(result.pair.name, "benchmarks")


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


def _peers(names: list[str] | None, servers: bool) -> list[str] | None:
    """The peers to compare with; of `servers`, those that have one."""
    if names is None:
        return None
    from specdec_core.studies.peers.choose import NAMES

    if servers and "transformers" in names:
        raise UserError("--peers transformers: it has no server to compare; under load, vllm")
    for name in names:
        if name not in (*NAMES, NOBODY):
            raise UserError(f"--peers {name}: expected {', '.join(NAMES)} or {NOBODY}")
    return [name for name in NAMES if name in names]


def _merged(under: dict, over: dict) -> dict:
    """`over` on top of `under`, a mapping key by key."""
    both = {k: {**under[k], **over[k]} for k in under if isinstance(over.get(k), dict)}
    return {**under, **over, **both}


if __name__ == "__main__":
    run(main)
