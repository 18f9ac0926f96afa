"""An engine without a server, put under the load that servers are put under: what HTTP costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from cluster.serving.server_process import Cores
from specdec_core.config import Configuration, PairSpec
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.evidence.load.load import BenchLoad
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.requests import LoadRecord, LoadRequest
from specdec_core.evidence.load.result import LoadRow
from specdec_core.models.pair import load_pair
from specdec_core.search.load.check import LiveRun, run_arrivals, run_clients


@dataclass(frozen=True)
class EngineAlone:
    """A row for the engine of a server's row, in a process of its own. Its clients wait in that
    process; like those of a server they ask while the engine is in its next step."""

    row: LoadRow
    pair: PairSpec
    needed: bool = True

    @classmethod
    def of(cls, served: LoadRow, pair: PairSpec) -> EngineAlone:
        """That of our server `served`, which has `pair` with its data types resolved."""
        named = {"name": f"{served.name}, engine alone", "over_http": False, "runs": {}}
        return cls(served.model_copy(update=named), pair)

    def measure(
        self, plan: LoadPlan, workload: Sequence[LoadRequest], load: BenchLoad, cores: Cores
    ) -> list[LoadRecord]:
        """Start the engine, warm it up with prompts that are not measured, and put it under load.
        Raises :class:`UserError` where the pair or the configuration cannot be used."""
        assert self.row.configuration is not None  # it is one of ours
        what = self.pair, self.row.configuration, plan, tuple(workload), load, cores.engine
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(_answer, *what).result()


def _answer(
    spec: PairSpec,
    configuration: Configuration,
    plan: LoadPlan,
    workload: Sequence[LoadRequest],
    load: BenchLoad,
    cores: tuple[int, ...],
) -> list[LoadRecord]:
    """What an engine of this process answers, under the limits of a server in a comparison."""
    if cores:
        os.sched_setaffinity(0, cores)
    pair = load_pair(spec)
    torch.set_num_threads(pair.spec.runner.threads)
    engine = Engine(pair, configuration, limits=Limits(plan.together(load)))
    together, measured = plan.warm_up(load), plan.requests_of(load, workload)
    run_clients(engine, _requests(workload[:together]), together, texts=True)
    requests = _requests(measured)
    if load.clients is not None:
        run = run_clients(engine, requests, load.clients, texts=True, apart=True)
        return _records(run, measured)
    arrivals = [asked.arrival for asked in measured if asked.arrival is not None]
    return _records(run_arrivals(engine, requests, arrivals, texts=True), measured)


def _requests(workload: Sequence[LoadRequest]) -> list[Request]:
    """Greedy and past the ends of texts, as servers are asked; their prompts are token ids."""
    return [
        Request(str(number), tuple(map(int, asked.prompt)), asked.max_new_tokens, ignore_eos=True)
        for number, asked in enumerate(workload)
    ]


def _records(run: LiveRun, measured: Sequence[LoadRequest]) -> list[LoadRecord]:
    """A record of each request, in order."""
    records = []
    for times in run.records.to_dict("records"):
        index = times["index"]
        generation = run.generations[str(index)]
        counts = generation.counts
        records.append(
            LoadRecord(
                index=index,
                arrival=measured[index].arrival,
                sent=times["sent"],
                first=times["first"],
                last=times["last"],
                prompt_tokens=generation.prompt_tokens,
                tokens=counts.n,
                text=generation.text,
                rounds=counts.n_target,
                drafted=counts.n_drafted,
            )
        )
    return records
