"""`specdec bench --clients` and `--rate`: this engine's server and vLLM's under the same load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jobs.bench_vllm import our_modes
from jobs.console import console, interruptible, point, print_runs_page
from specdec_core.base.errors import UserError

if TYPE_CHECKING:
    from cluster.load_comparison import Entrant
    from cluster.serving.server_process import Cores
    from specdec_core.models.pair import Pair
    from specdec_core.prompts.prompt_sets import Prompt
    from specdec_core.studies.load.plan import LoadPlan
    from specdec_core.studies.load.requests import LoadRequest
    from specdec_core.studies.load.result import LoadResult
    from specdec_core.studies.peers.vllm import VllmMode

ROWS = Path(__file__).with_name("bench_load.yaml")
QUICK: dict[str, Any] = {
    "max_new_tokens": 32, "repeats": 1, "least": 8, "waves": 2, "arrivals": 16
}  # fmt: skip
SERVE = (sys.executable, "-m", "jobs.serve")


def bench_load(
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
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import PromptSet
    from specdec_core.studies.load.requests import LoadRecord
    from specdec_core.studies.load.result import LoadResult
    from specdec_core.studies.parts import Parts, described

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
