"""Time this engine against what people use instead, on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.bench import (
    NO_PEERS,
    BenchRepeats,
    Configs,
    Graphs,
    MeasureAgain,
    Only,
    Rows,
    Threads,
    deliver,
    end,
    loaded,
    measuring,
    merged,
    plan_options,
    result_folder,
)
from jobs.console import console, run, typed
from jobs.options import (
    Drafts,
    DType,
    MaxLength,
    MaybeChatTemplate,
    MaybeLimit,
    MaybePrompts,
    MaybeTokens,
    Name,
    Placed,
    Target,
    given,
)
from specdec_core.base.errors import UserError
from specdec_core.config import Placement

ROWS = Path(__file__).with_name("bench.yaml")
QUICK = {"max_new_tokens": 32, "repeats": 1, "prompts": {"limit": 4}}


def main(
    config: Configs = None,
    rows: Rows = None,
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
    peers: Annotated[
        list[str] | None,
        Option(help="transformers, vllm or none; repeatable; unset, all that are installed."),
    ] = None,
    compile: Graphs = None,
    threads: Threads = None,
    dtype: DType = None,
    only: Only = None,
    cluster: Placed = None,
    quick: Annotated[
        bool, Option("--quick", help="A first look: 4 prompts, 32 new tokens, once.")
    ] = False,
    name: Name = None,
    fresh: MeasureAgain = False,
) -> None:
    """Decode the same prompts with this engine, transformers and vLLM, interleaved. Report the
    speedups, whether each writes what the target model alone would write, and where this engine's
    time goes. Interrupted, the same command resumes with the repeat that it was at. Run it on an
    otherwise idle machine. With --cluster this engine is timed alone, on these devices."""
    placement = None
    if cluster is not None:
        if set(peers or ()) - {NO_PEERS}:
            raise UserError("--cluster has the devices of this engine's models, not of --peers")
        placement, peers = Placement.load(cluster), [NO_PEERS]
    options = plan_options(locals(), servers=False, temperatures=temperature or None)
    # torch and transformers take seconds to import.
    from dashboards.progress import RaceProgress
    from dashboards.reports.bench import report
    from specdec_core.evidence.bench.benchmark import BenchPlan, open_peers, run_bench
    from specdec_core.evidence.bench.result import Take

    plan = BenchPlan.load(rows or ROWS, **merged(QUICK if quick else {}, options))
    folder = result_folder(name, plan)
    devices = given(devices=placement and placement.model_dump(mode="json"))
    with (
        loaded(plan, plan.prompts.limit, placement) as (pair, asked),
        measuring(plan, folder, pair, asked, name, Take, fresh, **devices) as under_way,
    ):
        pair, modes = under_way.pair, under_way.our_modes
        with (
            RaceProgress(console) as progress,
            open_peers(plan, pair, peers is not None, progress, modes) as others,
        ):
            command, parts = typed("bench offline"), under_way.parts
            result = run_bench(plan, asked, pair, others, folder.name, command, progress, parts)
        deliver(result, report(result), asked, folder)
    end(len(result.unequal()))


if __name__ == "__main__":
    run(main)
