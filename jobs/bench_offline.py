"""Time this engine against what people use instead, on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs import bench, options
from jobs.console import console, run, typed
from specdec_core.base.errors import UserError
from specdec_core.config import Placement, overridden

ROWS = Path(__file__).with_name("bench.yaml")
QUICK = {"max_new_tokens": 32, "repeats": 1, "prompts": {"limit": 4}}


def main(
    config: bench.Configs = None,
    rows: bench.Rows = None,
    target: options.Target = None,
    draft: options.Drafts = None,
    prompts: options.MaybePrompts = None,
    chat_template: options.MaybeChatTemplate = None,
    limit: options.MaybeLimit = None,
    max_new_tokens: options.MaybeTokens = None,
    max_length: options.MaxLength = None,
    repeats: bench.BenchRepeats = None,
    temperature: Annotated[
        list[float] | None, Option(help="0 is greedy; repeatable, each is a race.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        Option(help="transformers, vllm or none; repeatable; unset, all that are installed."),
    ] = None,
    compile: options.Compile = None,
    threads: bench.Threads = None,
    dtype: options.DType = None,
    only: bench.Only = None,
    cluster: options.Placed = None,
    quick: Annotated[
        bool, Option("--quick", help="A first look: 4 prompts, 32 new tokens, once.")
    ] = False,
    name: options.Name = None,
    fresh: bench.MeasureAgain = False,
) -> None:
    """Decode the same prompts with this engine, transformers and vLLM, interleaved. Report the
    speedups, whether each output is the target model's own, and where this engine's time goes.
    Interrupted, the same command resumes with the interrupted repeat. Run it on an
    otherwise idle machine. With --cluster this engine is timed alone, on these devices."""
    placement = None
    if cluster is not None:
        if set(peers or ()) - {bench.NO_PEERS}:
            raise UserError("--cluster has the devices of this engine's models, not of --peers")
        placement, peers = Placement.load(cluster), [bench.NO_PEERS]
    devices = placement and placement.model_dump(mode="json")
    asked_for = bench.plan_options(
        locals(), servers=False, temperatures=temperature or None, cluster=devices
    )
    # torch and transformers take seconds to import.
    from dashboards.progress import RaceProgress
    from dashboards.reports.bench import report
    from specdec_core.evidence.bench.benchmark import BenchPlan, open_peers, run_bench
    from specdec_core.evidence.bench.result import Take

    plan = BenchPlan.load(rows or ROWS, **overridden(QUICK if quick else {}, asked_for))
    folder = options.result_folder("bench", name, plan.pair.name)
    with (
        bench.loaded(plan, plan.prompts.limit, placement) as (pair, asked),
        bench.measuring(plan, folder, pair, asked, name, Take, fresh) as under_way,
    ):
        pair, modes = under_way.pair, under_way.our_modes
        with (
            RaceProgress(console) as progress,
            open_peers(plan, pair, peers is not None, progress, modes) as others,
        ):
            command, parts = typed("bench offline"), under_way.parts
            result = run_bench(plan, asked, pair, others, folder.name, command, progress, parts)
        bench.deliver(result, report(result), asked, folder)
    bench.end(len(result.unequal()))


if __name__ == "__main__":
    run(main)
