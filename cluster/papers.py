"""The papers' tables measured: every configuration of them live, in one process, in turns.

A prompt is decoded by every configuration before the next prompt comes, so what the machine does
meanwhile meets all alike. A block is one repeat of one prompt set; it is written when it is
complete, and a run that was interrupted goes on with the next one. Whatever learns begins every
block anew.

    papers/<name>/plan.yaml            what was asked for, and its digest
                  pair.json            the pair with the data types that were found best
                  blocks/<set>-<repeat>.json
                  papers.json          the result
                  finished             written last
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import ray
from pydantic import TypeAdapter

from cluster.session import get, ray_session, resources
from cluster.sweep.timing import InterleavedTimes, alone, start_bench
from specdec_core.base.files import write_atomically
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.engine import Request
from specdec_core.models.pair import check_pair
from specdec_core.prompts.prompt_sets import PromptSet, digest
from specdec_core.search.folder import SweepFolder
from specdec_core.search.results import Timing
from specdec_core.studies.papers.inputs import load_sets, with_datastores
from specdec_core.studies.papers.plan import PaperPlan
from specdec_core.studies.papers.result import Measured, PapersResult

_TIMES = TypeAdapter(InterleavedTimes)


@dataclass(frozen=True)
class PapersFolder(SweepFolder):
    """Where the blocks and the result lie."""

    def papers(self) -> PapersResult | None:
        return PapersResult.load(self.path) if (self.path / "papers.json").exists() else None

    def block(self, prompts: str, repeat: int) -> Path:
        name = re.sub(r"[^\w.-]+", "-", prompts)
        return self.path / "blocks" / f"{name}-{repeat}.json"

    def save_block(self, prompts: str, repeat: int, watch: InterleavedTimes) -> None:
        write_atomically(self.block(prompts, repeat), _TIMES.dump_json(watch, indent=None).decode())

    def load_block(self, prompts: str, repeat: int) -> InterleavedTimes:
        return _TIMES.validate_json(self.block(prompts, repeat).read_text())


def run_papers(
    plan: PaperPlan,
    home: Path,
    name: str | None = None,
    fresh: bool = False,
    tell: Observer | None = None,
) -> tuple[PapersResult, PapersFolder]:
    """Measure what `plan` asks for in `<home>/papers/<name>`, or go on where an interrupted run
    stopped. The caller marks the folder finished once it has dealt with the result.

    Raises :class:`UserError` for bad input, before anything is written.
    """
    tell = tell or Observer()
    plan.check()
    tokenizer = check_pair(plan.pair)
    prompts = load_sets(plan, tokenizer, home, tell)
    sets = {
        key: PromptSet(source=source, count=len(own), digest=digest(own))
        for key, (source, own) in prompts.items()
    }
    identity = plan.digest({key: own.digest for key, own in sets.items()})
    folder = PapersFolder.claim(
        home / "papers", name or f"{plan.pair.name}-{identity[:8]}", identity, fresh
    )
    if (result := folder.papers()) is not None:
        return result, folder
    plan = with_datastores(plan, tokenizer, tell)
    work = plan.work(list(sets))
    tell.stage("connecting to Ray, loading the pair")
    with ray_session():
        runner = plan.pair.runner
        gpus = resources(runner.threads, runner.device)["GPU"]
        bench = start_bench(folder.pair() or plan.pair, gpus)
        requests = {
            key: get(bench.requests.remote(own, plan.max_new_tokens))
            for key, (_, own) in prompts.items()
            if key in work
        }
        pair = get(bench.spec.remote())
        distinct = list(dict.fromkeys(c for own in work.values() for c in own))
        tell.stage(f"warming {len(distinct)} configurations up")
        get(bench.warm_up.remote(distinct, next(iter(requests.values()))[0]))
        with folder.lock():
            folder.begin(plan.model_dump(mode="json"), identity)
            folder.save_pair(pair)
            with alone(bench, gpus, tell):
                _measure(plan, bench, work, requests, folder, tell)
            result = PapersResult(
                name=folder.name,
                started=datetime.now(UTC),
                plan=plan,
                pair=pair,
                sets={key: own for key, own in sets.items() if key in work},
                measured=[
                    measured for key, own in work.items() for measured in _read(folder, key, own)
                ],
                environment=get(bench.environment.remote()),
            )
            result.save(folder.path)
        ray.kill(bench)
    return result, folder


def _measure(
    plan: PaperPlan,
    bench: ray.actor.ActorHandle,
    work: Mapping[str, Mapping[Configuration, int]],
    requests: Mapping[str, Sequence[Request]],
    folder: PapersFolder,
    tell: Observer,
) -> None:
    """Decode every block that is not on disk."""
    blocks = [(key, repeat) for repeat in range(plan.repeats) for key in work]
    missing = [block for block in blocks if not folder.block(*block).exists()]
    done = sum(len(requests[key]) for key, repeat in blocks if (key, repeat) not in missing)
    tell.stage("decoding", sum(len(requests[key]) for key, _ in blocks), done)
    for key, repeat in missing:
        # Counts do not change with the repeat: what is not timed is decoded once.
        taken = [c for c, times in work[key].items() if repeat < max(times, 1)]
        watch = InterleavedTimes(turns=repeat * len(requests[key]))
        get(bench.forget.remote())
        for request in requests[key] if taken else ():
            watch.take(bench, taken, request, 0)
            tell.step()
        if repeat:
            watch.generations.clear()  # as in the first repeat
        for generation in (g for own in watch.generations.values() for g in own):
            generation.token_seconds = []
        folder.save_block(key, repeat, watch)


def _read(folder: PapersFolder, key: str, work: Mapping[Configuration, int]) -> list[Measured]:
    """What the blocks of a prompt set say."""
    first = folder.load_block(key, 0)
    blocks = [first]
    while folder.block(key, len(blocks)).exists():
        blocks.append(folder.load_block(key, len(blocks)))
    watch = InterleavedTimes(generations=first.generations)
    for configuration, times in work.items():
        own = blocks[: max(times, 1)]
        watch.seconds[configuration.id] = [block.seconds[configuration.id][0] for block in own]
    return [
        Measured.of(
            key,
            configuration,
            watch.generations[configuration.id],
            _timing(watch, configuration, times) if times else None,
        )
        for configuration, times in work.items()
    ]


def _timing(watch: InterleavedTimes, configuration: Configuration, times: int) -> Timing:
    """Against autoregressive decoding in the same repeats."""
    baseline = Configuration(sampling=configuration.sampling)
    seconds = {c.id: watch.seconds[c.id][:times] for c in (configuration, baseline)}
    return InterleavedTimes(seconds, watch.generations).timing(configuration, baseline)
