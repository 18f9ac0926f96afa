"""Time this engine against what people use instead, on the same prompts."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.choice import read_choice
from jobs.console import console, errors, print_runs_page, run
from jobs.sweep import given, parse_drafts
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec

ROWS = Path(__file__).with_name("bench.yaml")
QUICK = {"max_new_tokens": 32, "repeats": 1, "prompts": {"limit": 4}}
NOBODY = "none"


def main(
    config: Annotated[
        list[Path] | None,
        Option(
            help="YAML with `pair` and `configuration`, or the beginning of a configuration's id,"
            " to add as a row; repeatable. Left out, the champion, where there is one."
        ),
    ] = None,
    rows: Annotated[Path, Option(help="YAML with this engine's other rows")] = ROWS,
    target: Annotated[str | None, Option(help="target: hub id, folder, bundled:…")] = None,
    draft: Annotated[
        list[str] | None, Option(help="draft model, [name=]model; may be repeated")
    ] = None,
    prompts: Annotated[str | None, Option(help="JSONL file, hub id, bundled:…")] = None,
    limit: Annotated[int | None, Option(min=1, help="use the first n prompts")] = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="tokens for each prompt")] = None,
    repeats: Annotated[int | None, Option(min=1, help="times each prompt is decoded")] = None,
    temperature: Annotated[
        list[float] | None, Option(help="0 is greedy; may be repeated, each is a race")
    ] = None,
    peers: Annotated[
        list[str] | None,
        Option(help="transformers, vllm or none; may be repeated. Left out, all that are here."),
    ] = None,
    compile: Annotated[
        bool | None,
        Option(
            "--compile/--no-compile",
            help="this engine on compiled graphs, made at the first start; unset, as the pair says",
        ),
    ] = None,
    threads: Annotated[int | None, Option(min=1, help="CPU threads, of everybody")] = None,
    dtype: Annotated[
        str | None, Option(help="data type of all models: auto, float32, bfloat16, float16")
    ] = None,
    baseline: Annotated[
        Path | None,
        Option(help="answer file of Spec-Bench that its tasks' speedups are against"),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="a first look: 4 prompts, 32 new tokens, once")
    ] = False,
    name: Annotated[str | None, Option(help="name of the result's folder")] = None,
) -> None:
    """Decode the same prompts with this engine, transformers and vLLM, in turns, and say who is
    how much faster, whether everybody writes what the model alone would write, and how far from
    the physical limit this engine is. Run it on an otherwise idle machine."""
    spec, chosen = _chosen(config or [], target, draft)
    runner = given(compile=compile, threads=threads, target_dtype=dtype, draft_dtype=dtype)
    pair = spec.model_dump(mode="json")
    asked = given(
        pair={**pair, "runner": {**pair["runner"], **runner}},
        prompts=given(source=prompts, limit=limit) or None,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        temperatures=temperature or None,
        peers=_peers(peers),
        chosen=[configuration.model_dump(mode="json") for configuration in chosen],
    )
    from specdec_core.studies.bench.benchmark import load_bench_plan

    plan = load_bench_plan(rows, **_merged(QUICK if quick else {}, asked))
    name = name or f"{plan.pair.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if name == ".." or Path(name).name != name:
        raise UserError(f"--name {name}: expected a folder's name, not a path")
    root = workspace() / "bench"
    if (root / name).exists():
        raise UserError(f"{root / name} exists: give another --name")

    with console.status(f"loading {plan.pair.name}"):
        # torch, transformers and MLflow take seconds to import.
        from dashboards.bench import findings, log_bench, sections, write_bench
        from dashboards.progress import RaceProgress
        from specdec_core.base.files import atomic_folder
        from specdec_core.models.pair import load_pair
        from specdec_core.prompts.prompt_sets import load_prompts
        from specdec_core.studies.bench.benchmark import open_others, run_bench
        from specdec_core.studies.bench.spec_bench import read_answers

        answers = read_answers(baseline) if baseline is not None else None
        pair = load_pair(plan.pair)
        found = load_prompts(plan.prompts.source, plan.prompts.limit, pair.tokenizer)
    command = shlex.join(["specdec", "bench", *sys.argv[1 + sys.argv[1:2].count("bench") :]])
    try:
        with (
            RaceProgress(console) as progress,
            open_others(pair, plan.peers, peers is not None, progress) as others,
        ):
            result = run_bench(plan, found, pair, others, name, command, progress)
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        sys.exit(130)
    shown = sections(result, answers)

    def decode(tokens: list[int]) -> str:
        return pair.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    with atomic_folder(root / name) as folder:
        write_bench(result, shown, folder, decode)
    log_bench(result, shown, found, root / name)
    for section in shown:
        if section.on_console:
            console.print(section.rich())
    for line in findings(result):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"report    {root / name / 'report.md'}", soft_wrap=True)
    print_runs_page(result.pair.name, "benchmarks")
    if unequal := result.unequal():
        errors.print(
            f"[red]not lossless:[/red] in float32 {len(unequal)} of our rows wrote something else"
            " than autoregressive decoding"
        )
        sys.exit(1)


def _chosen(
    config: list[Path], target: str | None, draft: list[str] | None
) -> tuple[PairSpec, list[Configuration]]:
    """The pair, and the configurations given for it: those of the files, else the champion, if
    there is one and no other pair was asked for."""
    if config:
        choices = [read_choice(path)[0] for path in config]
        spec = choices[0].pair
        for path, choice in zip(config, choices, strict=True):
            if choice.pair != spec:
                raise UserError(f"{path}: another pair than {config[0]}'s; one run is for one pair")
    elif target is None and not draft:
        from dashboards.tracking import find_champion  # MLflow takes seconds to import

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
    changes = given(target=target, drafts=parse_drafts(draft) if draft or target else None)
    return spec.model_copy(update=changes), [choice.configuration for choice in choices]


def _peers(names: list[str] | None) -> list[str] | None:
    if names is None:
        return None
    from specdec_core.studies.peers.choose import NAMES

    for own in names:
        if own not in (*NAMES, NOBODY):
            raise UserError(f"--peers {own}: expected {', '.join(NAMES)} or {NOBODY}")
    return [own for own in NAMES if own in names]


def _merged(under: dict, over: dict) -> dict:
    """`over` on top of `under`, a mapping key by key."""
    both = {k: {**under[k], **over[k]} for k in under if isinstance(over.get(k), dict)}
    return {**under, **over, **both}


if __name__ == "__main__":
    run(main)
