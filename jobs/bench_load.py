"""`specdec bench --clients`: this engine's server and vLLM's under the same load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jobs.console import console, interruptible, point, print_runs_page
from specdec_core.base.errors import UserError

if TYPE_CHECKING:
    from cluster.serving.server_process import Cores
    from specdec_core.models.pair import Pair
    from specdec_core.prompts.prompt_sets import Prompt
    from specdec_core.studies.load.plan import LoadPlan
    from specdec_core.studies.load.requests import LoadRequest
    from specdec_core.studies.load.result import LoadResult, LoadRow

ROWS = Path(__file__).with_name("bench_load.yaml")
QUICK: dict[str, Any] = {"max_new_tokens": 32, "repeats": 1, "least": 8, "waves": 2}
SERVE = (sys.executable, "-m", "jobs.serve")


def bench_load(plan: LoadPlan, folder: Path, command: str, explicit: bool) -> LoadResult:
    """Compare the servers; write the result whole or not at all, log it and show it. `explicit` is
    whether the user named the peers, which then must be there."""
    from cluster.serving.server_process import Cores

    plan.check()
    cores = Cores.divide(plan.pair.runner.threads)
    pair, prompts, workload = _load(plan)
    started = datetime.now(UTC)
    with interruptible("nothing was written"):
        rows = _compare(plan, pair, workload, cores, explicit)
    # These take seconds to import, too.
    from specdec_core.base.environment import environment
    from specdec_core.prompts.prompt_sets import PromptSet, digest
    from specdec_core.studies.load.result import LoadResult

    result = LoadResult(
        name=folder.name,
        started=started,
        command=command,
        pair=pair.spec,
        prompts=PromptSet(source=plan.prompts.source, count=len(prompts), digest=digest(prompts)),
        max_new_tokens=plan.max_new_tokens,
        repeats=plan.repeats,
        clients=list(plan.clients),
        slots=plan.slots,
        requests={clients: plan.count(clients) for clients in plan.clients},
        rows=rows,
        notes=[cores.sentence],
        environment=environment(),
    )
    _deliver(result, prompts, folder)
    return result


def _load(plan: LoadPlan) -> tuple[Pair, list[Prompt], list[LoadRequest]]:
    """The pair, the prompts, and a request for each of them."""
    with console.status(f"loading {plan.pair.name}"):
        # torch and transformers take seconds to import.
        from specdec_core.models.pair import load_pair
        from specdec_core.prompts.prompt_sets import load_prompts

        pair = load_pair(plan.pair)
        limit = min(plan.prompts.limit or plan.needed, plan.needed)
        prompts = load_prompts(plan.prompts.source, limit, pair.tokenizer)
        return pair, prompts, plan.workload(prompts, pair)


def _compare(
    plan: LoadPlan, pair: Pair, workload: Sequence[LoadRequest], cores: Cores, explicit: bool
) -> list[LoadRow]:
    from cluster.load_comparison import compare_servers
    from cluster.load_servers import VLLM, our_servers, vllm_contestants
    from dashboards.progress import RaceProgress

    with TemporaryDirectory() as scratch, RaceProgress(console) as progress:
        contestants = list(our_servers(plan, pair, SERVE, cores, Path(scratch)))
        if VLLM in plan.peers:
            try:
                contestants += vllm_contestants(pair, cores, explicit)
            except UserError as error:
                if explicit:
                    raise
                progress.warned(f"without {VLLM}: {error}")
        return compare_servers(plan, contestants, workload, cores, progress)


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
