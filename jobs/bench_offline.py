"""Time this engine against what people use instead, on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.bench import (
    BenchRepeats,
    Configs,
    Graphs,
    MeasureAgain,
    Only,
    Peers,
    Threads,
    end,
    merged,
    pair_and_options,
    peers_of,
    result_folder,
)
from jobs.console import console, interruptible, point, print_runs_page, run, typed
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
    given,
)

if TYPE_CHECKING:
    from specdec_core.evidence.bench.benchmark import BenchPlan
    from specdec_core.evidence.bench.result import BenchResult, Take
    from specdec_core.evidence.parts import Parts
    from specdec_core.evidence.peers.vllm import VllmMode
    from specdec_core.models.pair import Pair
    from specdec_core.prompts.prompt_sets import Prompt

ROWS = Path(__file__).with_name("bench.yaml")
QUICK = {"max_new_tokens": 32, "repeats": 1, "prompts": {"limit": 4}}


def main(
    config: Configs = None,
    rows: Annotated[
        Path | None, Option(help="YAML with this engine's other rows; unset, jobs/bench.yaml.")
    ] = None,
    target: Target = None,
    draft: Drafts = None,
    prompts: MaybePrompts = None,
    chat_template: MaybeChatTemplate = None,
    limit: MaybeLimit = None,
    max_new_tokens: MaybeTokens = None,
    max_length: MaxLength = None,
    repeats: BenchRepeats = None,
    temperature: Annotated[
        list[float] | None, Option(help="0 is greedy; repeatable, each is a race.")
    ] = None,
    peers: Peers = None,
    compile: Graphs = None,
    threads: Threads = None,
    dtype: DType = None,
    baseline: Annotated[
        Path | None,
        Option(help="Spec-Bench answer file to compare its tasks' speeds with."),
    ] = None,
    only: Only = None,
    quick: Annotated[
        bool, Option("--quick", help="A first look: 4 prompts, 32 new tokens, once.")
    ] = False,
    name: Name = None,
    fresh: MeasureAgain = False,
) -> None:
    """Decode the same prompts with this engine, transformers and vLLM, interleaved. Report the
    speedups, whether each writes what the target model alone would write, and how close this engine
    comes to the physical limit. Interrupted, the same command resumes with the repeat that it was
    at. Run it on an otherwise idle machine."""
    runner = given(
        compile=compile,
        threads=threads,
        target_dtype=dtype,
        draft_dtype=dtype,
        max_length=max_length,
    )
    options = pair_and_options(
        config,
        target,
        draft,
        runner,
        prompts=given(source=prompts, limit=limit, chat_template=chat_template) or None,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        temperatures=temperature or None,
        peers=peers_of(peers, servers=False),
        only=only or None,
    )
    # torch and transformers take seconds to import.
    from jobs.bench_vllm import our_modes
    from specdec_core.base.environment import environment
    from specdec_core.evidence.bench.benchmark import load_bench_plan
    from specdec_core.evidence.bench.result import Take
    from specdec_core.evidence.parts import Parts, described
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import PromptSet

    plan = load_bench_plan(rows or ROWS, **merged(QUICK if quick else {}, options))
    folder = result_folder(name, plan)
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
    end(len(result.unequal()))


def _load(
    plan: BenchPlan, baseline: Path | None
) -> tuple[Pair, list[Prompt], list[dict[str, Any]] | None]:
    """The pair, the prompts, and the answers to compare with."""
    with console.status(f"loading {plan.pair.name}"):
        # torch and transformers take seconds to import.
        from specdec_core.drafting.heads.storage import load_card
        from specdec_core.evidence.bench.spec_bench import read_answers
        from specdec_core.models.pair import load_pair
        from specdec_core.prompts.prompt_sets import load_prompts

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
    from specdec_core.evidence.bench.benchmark import open_peers, run_bench

    with (
        RaceProgress(console) as progress,
        open_peers(plan, pair, explicit, progress, ours) as others,
    ):
        return run_bench(plan, prompts, pair, others, name, typed("bench offline"), progress, parts)


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
    from specdec_core.evidence.bench.spec_bench import write_answers

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


if __name__ == "__main__":
    run(main)
