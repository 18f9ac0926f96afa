"""Compare servers under the same load over HTTP: this engine's and other programs'."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs import bench, options
from jobs.console import console, run, typed
from specdec_core.base.errors import UserError
from specdec_core.config import overridden
from specdec_core.search.load.workload import Slo

if TYPE_CHECKING:
    from cluster.load.comparison import ServerContestant
    from cluster.load.cores import Cores
    from specdec_core.evidence.load.plan import LoadPlan

ROWS = Path(__file__).with_name("bench_load.yaml")
QUICK: dict[str, Any] = {
    "max_new_tokens": 32, "repeats": 1, "least": 8, "waves": 2, "arrivals": 16
}  # fmt: skip
SERVE = (sys.executable, "-m", "jobs.serve")


def main(
    clients: Annotated[
        str | None, Option(help="Clients that wait for their answers, as 1,4,8,16.")
    ] = None,
    rate: Annotated[
        str | None,
        Option(
            help="Requests a second, as 2,4.5, that arrive at random whether or not earlier ones"
            " are answered; with or without --clients."
        ),
    ] = None,
    slo: Annotated[
        str | None,
        Option(help="Limits in seconds, as ttft=0.5,tpot=0.05; requests within them are goodput."),
    ] = None,
    seed: Annotated[
        int | None, Option(min=0, help="With --rate: the seed of the arrival times.")
    ] = None,
    requests: Annotated[
        int | None,
        Option(
            min=1,
            help="Requests to a server; unset, 24, or 3 for each client if that is more, and 64 at"
            " a rate.",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        Option(
            min=1,
            help="Requests that a server decodes together; unset, the number of clients, and 16 at"
            " a rate.",
        ),
    ] = None,
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
    peers: Annotated[
        list[str] | None,
        Option(help="vllm, llama_cpp or none; repeatable; unset, those that are installed."),
    ] = None,
    compile: options.Compile = None,
    threads: bench.Threads = None,
    dtype: options.DType = None,
    only: bench.Only = None,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="A first look: 8 requests, or 2 for each client, and 16 at a rate; 32 new tokens,"
            " once.",
        ),
    ] = False,
    name: options.Name = None,
    fresh: bench.MeasureAgain = False,
) -> None:
    """Send the same requests to this engine's server, vLLM's and llama.cpp's, interleaved, and
    compare throughput, TTFT and time per output token at each load. Interrupted, the same command
    resumes with the interrupted server. Run it on an otherwise idle machine."""
    load_options = _load_options(clients, rate, slo, seed, requests, slots)
    asked_for = bench.plan_options(locals(), servers=True, **load_options)
    # torch takes seconds to import.
    from cluster.load.comparison import compare_servers
    from cluster.load.cores import Cores
    from dashboards.progress import RaceProgress
    from dashboards.reports.load import report
    from specdec_core.evidence.load.plan import LoadPlan
    from specdec_core.evidence.load.result import LoadResult
    from specdec_core.search.load.records import LoadRecord

    plan = LoadPlan.load(rows or ROWS, **overridden(QUICK if quick else {}, asked_for))
    started = datetime.now(UTC)
    folder = options.result_folder("bench", name, plan.pair.name)
    plan.check()
    cores = Cores.divide(plan.pair.runner.threads)
    limit = min(plan.prompts.limit or plan.needed, plan.needed)
    with (
        TemporaryDirectory() as scratch,
        bench.loaded(plan, limit) as (pair, asked),
        bench.measuring(
            plan, folder, pair, asked, name, LoadRecord, fresh, cores=cores.sentence
        ) as under_way,
    ):
        workload = plan.workload(asked, pair)
        with RaceProgress(console) as progress:
            contestants = _contestants(
                plan, under_way, cores, Path(scratch), peers is not None, progress.warned
            )
            notes = [cores.sentence, *under_way.parts.notes]
            servers = compare_servers(plan, contestants, workload, cores, under_way.parts, progress)
        result = LoadResult(
            name=folder.name,
            started=started,
            command=typed("bench serve"),
            pair=under_way.pair.spec,
            prompts=under_way.prompts,
            max_new_tokens=plan.max_new_tokens,
            repeats=plan.repeats,
            loads=plan.loads,
            slo=plan.slo,
            slots=plan.slots,
            one_server=plan.one_server,
            rows=servers,
            notes=notes,
            environment=under_way.facts,
        )
        bench.deliver(result, report(result), asked, folder)
    bench.end(len({row.name for _, row in result.unequal()}))


def _load_options(
    clients: str | None,
    rate: str | None,
    slo: str | None,
    seed: int | None,
    requests: int | None,
    slots: int | None,
) -> dict[str, Any]:
    """The options that describe the load. Raises :class:`UserError` where they name none."""
    if clients is None and rate is None:
        raise UserError("--clients or --rate says the load, as --clients 1,4,8: give one")
    if seed is not None and rate is None:
        raise UserError("--seed needs --rate: with --clients nothing comes at random")
    rates = options.numbers(rate, "--rate", float) if rate is not None else ()
    if not all(0 < value < float("inf") for value in rates):
        raise UserError(f"--rate {rate}: expected requests a second as 2,4.5")
    objective = Slo.read(slo, "--slo").model_dump(exclude_none=True) if slo is not None else None
    return {
        "clients": options.sizes(clients, "--clients") if clients is not None else (),
        "rates": rates,
        **options.given(slo=objective, seed=seed, requests=requests, slots=slots),
    }


def _contestants(
    plan: LoadPlan,
    under_way: bench.BenchRun,
    cores: Cores,
    scratch: Path,
    explicit: bool,
    warned: Callable[[str], None],
) -> list[ServerContestant]:
    """Our servers, with their files in `scratch`, and others that are installed. With `explicit`
    the user named the peers, which must then be installed."""
    from cluster.load.servers import other_servers, our_servers
    from specdec_core.servers.table import server_of

    pair, ours = under_way.pair, under_way.our_modes
    contestants = list(our_servers(plan, pair, SERVE, cores, scratch))
    for name in plan.peers:
        server = server_of(name, stage="serve", option="--peers")
        told = None if explicit else warned
        contestants += other_servers(server, pair, cores, scratch, ours.get(name, ()), told)
    names = [contestant.row.name for contestant in contestants]
    for part in plan.only:
        if not any(part in name for name in names):
            raise UserError(
                f"--only {part}: no server's name contains it (they are: {', '.join(names)})"
            )
    return [
        each
        for each in contestants
        if plan.wants(each.row.name) or (each.row.ours and each.row.autoregressive)
    ]


if __name__ == "__main__":
    run(main)
