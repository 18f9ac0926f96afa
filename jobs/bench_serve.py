"""Compare servers under the same load over HTTP: this engine's and vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.bench import (
    BenchRepeats,
    Configs,
    Graphs,
    MeasureAgain,
    Only,
    Threads,
    end,
    merged,
    pair_and_options,
    peers_of,
    result_folder,
)
from jobs.bench_vllm import our_modes
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
    numbers,
    sizes,
)
from specdec_core.base.errors import UserError
from specdec_core.search.load.workload import Slo

if TYPE_CHECKING:
    from cluster.load_comparison import Entrant
    from cluster.serving.server_process import Cores
    from specdec_core.evidence.load.plan import LoadPlan
    from specdec_core.evidence.load.requests import LoadRequest
    from specdec_core.evidence.load.result import LoadResult
    from specdec_core.evidence.peers.vllm import VllmMode
    from specdec_core.models.pair import Pair
    from specdec_core.prompts.prompt_sets import Prompt

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
    seed: Annotated[int | None, Option(min=0, help="With --rate: of the arrival times.")] = None,
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
    engine_alone: Annotated[
        bool,
        Option(
            "--engine-alone",
            help="Measure this engine without a server, too, and report what HTTP costs.",
        ),
    ] = False,
    config: Configs = None,
    rows: Annotated[
        Path | None, Option(help="YAML with this engine's other rows; unset, jobs/bench_load.yaml.")
    ] = None,
    target: Target = None,
    draft: Drafts = None,
    prompts: MaybePrompts = None,
    chat_template: MaybeChatTemplate = None,
    limit: MaybeLimit = None,
    max_new_tokens: MaybeTokens = None,
    max_length: MaxLength = None,
    repeats: BenchRepeats = None,
    peers: Annotated[
        list[str] | None, Option(help="vllm or none; repeatable; unset, vllm if it is installed.")
    ] = None,
    compile: Graphs = None,
    threads: Threads = None,
    dtype: DType = None,
    only: Only = None,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="A first look: 8 requests, or 2 for each client, and 16 at a rate; 32 new tokens,"
            " once.",
        ),
    ] = False,
    name: Name = None,
    fresh: MeasureAgain = False,
) -> None:
    """Send the same requests to this engine's server and to vLLM's, one server after the other, and
    compare throughput, TTFT and time per output token at each load. Interrupted, the same command
    resumes with the server that it was at. Run it on an otherwise idle machine."""
    load = _load_options(clients, rate, slo, seed, requests, slots, engine_alone)
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
        peers=peers_of(peers, servers=True),
        only=only or None,
        **load,
    )
    # torch takes seconds to import.
    from specdec_core.evidence.bench.benchmark import read_bench_plan
    from specdec_core.evidence.load.plan import LoadPlan

    plan = read_bench_plan(LoadPlan, rows or ROWS, **merged(QUICK if quick else {}, options))
    folder = result_folder(name, plan)
    result = _compare(plan, folder, name, typed("bench serve"), peers is not None, fresh)
    end(len(result.unequal()))


def _load_options(
    clients: str | None,
    rate: str | None,
    slo: str | None,
    seed: int | None,
    requests: int | None,
    slots: int | None,
    engine_alone: bool,
) -> dict[str, Any]:
    """What the options say of a load. Raises :class:`UserError` where they name none."""
    if clients is None and rate is None:
        raise UserError("--clients or --rate says the load, as --clients 1,4,8: give one")
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


def _compare(
    plan: LoadPlan, folder: Path, name: str | None, command: str, explicit: bool, fresh: bool
) -> LoadResult:
    """Compare the servers; write the result into `folder` whole or not at all, log it and show it.
    What an interrupted comparison of the same plan, prompts, code and `name` has measured is not
    measured again, unless `fresh`. `explicit` is whether the user named the peers, which then must
    be there."""
    from cluster.serving.server_process import Cores

    plan.check()
    cores = Cores.divide(plan.pair.runner.threads)
    pair, prompts, workload = _load(plan)
    # These take seconds to import, too.
    from cluster.load_comparison import compare_servers
    from dashboards.progress import RaceProgress
    from specdec_core.base.environment import environment
    from specdec_core.evidence.load.requests import LoadRecord
    from specdec_core.evidence.load.result import LoadResult
    from specdec_core.evidence.parts import Parts, described
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import PromptSet

    ours = our_modes(plan, pair)
    started, facts = datetime.now(UTC), environment()
    prompt_set = PromptSet.of(plan.prompts.source, prompts, plan.prompts.chat_template)
    told = [mode.speculative for mode in ours]
    what = described(name, plan, plan.weights(pair), prompt_set, told, facts, cores=cores.sentence)
    with (
        interruptible(),
        Parts.open(folder.parent, what, LoadRecord, fresh) as parts,
        TemporaryDirectory() as scratch,
    ):
        if (spec := parts.pair(pair.spec)) != pair.spec:
            pair = load_pair(spec)
        with RaceProgress(console) as progress:
            contestants = _contestants(
                plan, pair, cores, Path(scratch), explicit, ours, progress.warned
            )
            resumed = parts.notes
            rows = compare_servers(plan, contestants, workload, cores, parts, progress)
        result = LoadResult(
            name=folder.name,
            started=started,
            command=command,
            pair=pair.spec,
            prompts=prompt_set,
            max_new_tokens=plan.max_new_tokens,
            repeats=plan.repeats,
            clients=list(plan.clients),
            rates=list(plan.rates),
            slo=plan.slo,
            slots=plan.slots,
            requests={load.key: plan.count(load) for load in plan.loads},
            rows=rows,
            notes=[cores.sentence, *resumed],
            environment=facts,
        )
        _deliver(result, prompts, folder)
        parts.remove()
    return result


def _load(plan: LoadPlan) -> tuple[Pair, list[Prompt], list[LoadRequest]]:
    """The pair, the prompts, and a request for each of them."""
    with console.status(f"loading {plan.pair.name}"):
        # torch and transformers take seconds to import.
        from specdec_core.models.pair import load_pair
        from specdec_core.prompts.prompt_sets import load_prompts

        pair = load_pair(plan.pair)
        limit = min(plan.prompts.limit or plan.needed, plan.needed)
        prompts = load_prompts(
            plan.prompts.source, limit, pair.tokenizer, plan.prompts.chat_template
        )
        return pair, prompts, plan.workload(prompts, pair)


def _contestants(
    plan: LoadPlan,
    pair: Pair,
    cores: Cores,
    scratch: Path,
    explicit: bool,
    ours: Sequence[VllmMode],
    warned: Callable[[str], None],
) -> list[Entrant]:
    """Our servers, whose files are in `scratch`, their engines alone where that is asked for, and
    vLLM's servers where it is installed."""
    from cluster.engine_alone import EngineAlone
    from cluster.load_servers import VLLM, our_servers, vllm_contestants

    contestants: list[Entrant] = []
    for server in our_servers(plan, pair, SERVE, cores, scratch):
        contestants.append(server)
        if plan.engine_alone:
            contestants.append(EngineAlone.of(server.row, pair.spec))
    if VLLM in plan.peers:
        try:
            contestants += vllm_contestants(pair, cores, explicit, scratch, ours)
        except UserError as error:
            if explicit:
                raise
            warned(f"without {VLLM}: {error}")
    for part in plan.only:
        if not any(part in contestant.row.name for contestant in contestants):
            names = ", ".join(contestant.row.name for contestant in contestants)
            raise UserError(f"--only {part}: no server's name contains it (they are: {names})")
    return [
        contestant
        for contestant in contestants
        if plan.wants(contestant.row.name)
        or (contestant.row.ours and contestant.row.autoregressive and contestant.row.over_http)
    ]


def _deliver(result: LoadResult, prompts: Sequence[Prompt], folder: Path) -> None:
    from dashboards.outputs.console import show
    from dashboards.outputs.files import write
    from dashboards.outputs.mlflow_runs import log
    from dashboards.reports.load import report
    from specdec_core.base.files import atomic_folder

    shown = report(result)
    with atomic_folder(folder) as place:
        result.save(place)
        write(shown, place)
    log(shown, [folder], prompts=(result.prompts, prompts))
    show(console, shown.sections)
    point("report", folder / "report.md")
    print_runs_page(result.pair.name, "benchmarks")


if __name__ == "__main__":
    run(main)
