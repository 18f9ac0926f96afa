"""Measuring the papers' tables: every configuration live, by one engine, interleaved.

All configurations decode a prompt before the next one comes, so that the machine's load falls on
all alike. A block is one repeat of one prompt set. It is written when it is complete, and an
interrupted run resumes with the next. Policies and drafters that learn start every block anew.

    papers/<name>/plan.yaml            the plan as given, and its digest
                  pair.json            the pair with concrete data types
                  blocks/<set>-<repeat>.json
                  papers.json          the result
                  logged               the run in MLflow that has it
                  finished             written last
    papers/sections/<key>-….parquet    the page's sections (:func:`study_tables`)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter
from ray.exceptions import RayActorError

from cluster.placed_engine import check_placement
from cluster.recording import run_recording, weights_of
from cluster.session import Remote, ray_session, resources
from cluster.sweep.alone import alone
from cluster.sweep.measuring import open_measuring
from research.long_form.study import LongForm, LongFormPlan, measure_long_form, ranges_for
from research.papers.inputs import load_sets, place_of, with_own_heads
from research.papers.near_ties import FirstDifference, logit_gap, shared
from research.papers.plan import PaperPlan, RecordingNeeded
from research.papers.result import Measured, PapersResult
from research.papers.studies import LONG_FORM, LONG_FORM_GREEDY, OWN_HEADS, PAIR, TIMES, Input
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, PairSpec
from specdec_core.drafting.trained import head_digest, trained_digests, weights_here
from specdec_core.engine import Request
from specdec_core.engine.turns import requests_of
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.forward_times import forward_times
from specdec_core.measure.losses import again_if_lost
from specdec_core.models.fingerprints import fingerprints
from specdec_core.models.loading import load_tokenizer
from specdec_core.models.pair import check_pair, eagle_heads_of, load_pair
from specdec_core.models.runner import CacheLost
from specdec_core.prompts.prompt_sets import Prompt, PromptSet, digest, load_prompts
from specdec_core.prompts.source import PromptSource
from specdec_core.recordings.plan import RecordingPlan, planned
from specdec_core.recordings.schema import Recording
from specdec_core.search.folder import SweepFolder
from specdec_core.search.results import Timing
from specdec_core.tokens.statistics import Generation


@dataclass
class Block:
    """A repeat of a prompt set: seconds and, of the first repeat, generations [prompt], by
    configuration id."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    generations: dict[str, list[Generation]] = field(default_factory=dict)


_BLOCK = TypeAdapter(Block)


@dataclass(frozen=True)
class PapersFolder(SweepFolder):
    """The folder of the blocks and the result."""

    @classmethod
    def measured(cls, root: Path, digest: str) -> Self | None:
        """The latest finished folder of this digest under `root`; None where there is none."""
        marks = sorted(root.glob("*/finished"), key=lambda mark: -mark.stat().st_mtime_ns)
        folders = (cls(mark.parent) for mark in marks)
        return next(
            (each for each in folders if each.digest == digest and each.result(PapersResult)), None
        )

    @property
    def sections(self) -> Path:
        """The tables of the page's sections, of all runs."""
        return self.path.parent / "sections"

    def is_of_these_weights(self, result: PapersResult) -> bool:
        """Whether its models and heads are as they were when it was measured. Raises
        :class:`UserError` for models that are missing."""
        trained = trained_digests(each.configuration for each in result.measured)
        return self.weights() == fingerprints(result.plan.pair) | trained

    def block(self, prompts: str, repeat: int) -> Path:
        name = re.sub(r"[^\w.-]+", "-", prompts)
        return self.path / "blocks" / f"{name}-{repeat}.json"

    def save_block(self, prompts: str, repeat: int, block: Block) -> None:
        write_atomically(self.block(prompts, repeat), _BLOCK.dump_json(block).decode())

    def load_block(self, prompts: str, repeat: int) -> Block:
        return _BLOCK.validate_json(self.block(prompts, repeat).read_text())


def run_papers(
    plan: PaperPlan,
    home: Path,
    name: str | None = None,
    fresh: bool = False,
    observer: Observer | None = None,
    again: bool = True,
) -> tuple[PapersResult, PapersFolder]:
    """Measure `plan` in `<home>/papers/<name>`, or resume an interrupted run in it. The caller
    marks the folder finished once it has used the result. Unless `again`, a finished run of the
    same plan and prompts is taken instead, if there is one; its words are the ones of `plan`.

    Raises :class:`UserError` for bad input, before anything is written.
    """
    observer = observer or Observer()
    plan.check()
    tokenizer = check_pair(plan.pair)
    plan = with_own_heads(plan, observer)  # a head that is trained later makes another plan
    if plan.cluster is not None:
        decoded = [c for timed in plan.work([*plan.prompts]).values() for c in timed]
        check_placement(plan.pair, plan.cluster, decoded)
    prompts = load_sets(plan, tokenizer, home, observer)
    sets = {
        key: PromptSet.of(source, loaded, plan.prompts[key].chat_template)
        for key, (source, loaded) in prompts.items()
    }
    identity = plan.digest({key: prompt_set.digest for key, prompt_set in sets.items()})
    done = None if again or fresh or name else PapersFolder.measured(home / "papers", identity)
    if done and (result := done.result(PapersResult)) and done.is_of_these_weights(result):
        observer.stage(f"reading {done.path}")
        return result.model_copy(update={"plan": plan}), done
    own = name or f"{plan.pair.name}-{identity[:8]}"
    folder = PapersFolder.claim(home / "papers", own, identity, fresh)
    if (result := folder.result(PapersResult)) is not None:
        measured = [each.configuration for each in result.measured]
        folder.check_weights(weights_here(result.plan.pair, measured))
        return result.model_copy(update={"plan": plan}), folder
    work = plan.work(list(sets))
    texts = {key: loaded for key, (_, loaded) in prompts.items() if key in work}
    observer.stage("connecting to Ray, loading the pair")

    def once() -> PapersResult:
        try:
            return _measured(plan, work, texts, sets, folder, identity, observer)
        except RayActorError:
            raise CacheLost("the measuring process was lost") from None

    with ray_session():
        return again_if_lost(once, observer), folder


def _measured(
    plan: PaperPlan,
    work: Mapping[str, Mapping[Configuration, int]],
    texts: Mapping[str, Sequence[Prompt]],
    sets: Mapping[str, PromptSet],
    folder: PapersFolder,
    identity: str,
    observer: Observer,
) -> PapersResult:
    """Load the pair, and measure what is not in `folder` yet."""
    runner = plan.pair.runner
    gpus = resources(runner.threads, runner.device)["GPU"]
    with open_measuring(folder.pair() or plan.pair, plan.cluster, gpus) as (measuring, placed):
        requests = {key: measuring.requests(t, plan.max_new_tokens) for key, t in texts.items()}
        pair = measuring.spec()
        distinct = list(dict.fromkeys(c for timed in work.values() for c in timed))
        observer.stage(f"warming {len(distinct)} configurations up")
        first = next(iter(requests.values()))[0]
        again_if_lost(partial(measuring.prepare, distinct, first), observer)
        weights = measuring.fingerprints() | trained_digests(distinct)
        with folder.lock():
            folder.keep_weights(weights)
            folder.begin(plan.model_dump(mode="json"), identity)
            folder.save_pair(pair)
            with alone(measuring, gpus, observer, placed):
                _measure(plan, measuring, work, requests, folder, observer)
                find = partial(_differences, measuring, work, requests, folder)
                differences = again_if_lost(find, observer)
            result = PapersResult(
                name=folder.name,
                started=datetime.now(UTC),
                plan=plan,
                pair=pair,
                sets={key: sets[key] for key in sets if key in work},
                measured=[m for key, timed in work.items() for m in _read(folder, key, timed)],
                environment=measuring.environment(),
                target_costs=measuring.__ray_call__(
                    lambda own: {name: cost.calls for name, cost in own.engine.costs.known.items()}
                ),
                differences=differences,
            )
            result.save(folder.path)
    return result


def study_inputs(
    plan: PaperPlan,
    result: PapersResult,
    folder: PapersFolder,
    home: Path,
    wanted: Collection[str],
    observer: Observer,
    long_form: LongFormPlan | None = None,
) -> dict[str, Input]:
    """The inputs among `wanted` of the page's sections: the tables' pair, the workspace's forward
    times, measured if missing, the plan's trained heads by name, long texts by the plan
    `long_form`, also greedy, and the plan's recordings, each made or resumed in `<home>/traces`.
    Optional prompt sets that are missing are left out with a warning, and so are the recordings of
    a pair without draft models."""
    inputs = {}
    if TIMES in wanted:
        # Without the policies' own times, which some of them might have and others not.
        measured = forward_times(result.pair, [], None, observer)
        times = measured.model_copy(update={"policies": {}})
        key = hashlib.sha256(times.model_dump_json().encode()).hexdigest()
        inputs[TIMES] = Input(key, lambda: times)
    if PAIR in wanted:
        inputs[PAIR] = Input(f"{folder.digest} {folder.weights()}", lambda: result.pair)
    if OWN_HEADS in wanted:
        trained = [(name, head_digest(head)) for name, head in plan.heads.items()]
        inputs[OWN_HEADS] = Input(str(trained), lambda: plan.heads)
    if long_form is not None:
        greedy = long_form.model_copy(update={"temperatures": (0.0,)})
        by_name = {LONG_FORM: long_form, LONG_FORM_GREEDY: greedy}
        for name, texts in by_name.items():
            if name not in wanted:
                continue
            weights = fingerprints(plan.pair) | trained_digests(texts.configurations(name))
            prints = str(sorted(weights.items()))
            content = [texts.model_dump_json(), prints, digest(_long_prompts(texts))]
            key = hashlib.sha256("".join(content).encode()).hexdigest()
            inputs[name] = Input(key, partial(_write_long, texts, observer))
    asked = {name: each for name, each in plan.recordings.items() if name in wanted}
    if asked and not _draft_models(plan.pair):
        observer.warned("nothing is recorded: the pair has no draft model")
        asked = {}
    for name, sets in _record(plan, asked, home, observer).items():
        digests = [(key, recording.digest) for key, recording in sets.items()]
        inputs[name] = Input(str(digests), partial(dict, sets))
    return inputs


def _long_prompts(plan: LongFormPlan) -> list[Prompt]:
    asked, tokenizer = plan.prompts, load_tokenizer(plan.pair.target)
    return load_prompts(asked.source, asked.limit, tokenizer, asked.chat_template)


def _write_long(plan: LongFormPlan, observer: Observer) -> LongForm:
    """Long texts by `plan`, in this process."""
    observer.stage(f"loading {plan.pair.name}")
    pair = load_pair(plan.pair)
    tokens = [request.tokens for request in requests_of(_long_prompts(plan), pair, 1)]
    configurations = plan.configurations("long_form")
    contexts = plan.contexts or ranges_for(pair.max_length, tokens)
    temperature, repeats = plan.temperatures[0], plan.repeats
    return measure_long_form(pair, configurations, tokens, contexts, temperature, repeats, observer)


def _record(
    plan: PaperPlan, asked: Mapping[str, RecordingNeeded], home: Path, observer: Observer
) -> dict[str, dict[str, Recording]]:
    """The recordings by the names of what is `asked` for and of its sets."""
    plans: dict[tuple[str, str], RecordingPlan] = {}
    for key, recorded in asked.items():
        for name in recorded.prompts:
            wanted = recording_plan(plan, recorded, name, home)
            try:
                planned(wanted, home, weights_of)
            except UserError as error:
                if not plan.prompts[name].optional:
                    raise
                observer.warned(f"{name} is not recorded ({error})")
            else:
                plans[key, name] = wanted
    made: dict[str, dict[str, Recording]] = {}
    for (key, name), wanted in plans.items():
        made.setdefault(key, {})[name] = run_recording(wanted, home, observer=observer)
    return made


def recording_plan(
    plan: PaperPlan, recorded: RecordingNeeded, name: str, home: Path
) -> RecordingPlan:
    """The recording of the set `name`. It is of the pair's draft models alone: no section looks at
    an EAGLE head, which would have to draft anew from every position."""
    prompts = plan.prompts[name]
    return RecordingPlan(
        pair=plan.pair.model_copy(update={"drafts": _draft_models(plan.pair)}),
        prompts=PromptSource(
            source=place_of(prompts, home)[1],
            limit=recorded.limit or prompts.limit,
            chat_template=prompts.chat_template,
        ),
        sampling=recorded.sampling,
        max_new_tokens=recorded.max_new_tokens or plan.max_new_tokens,
        max_draft=recorded.max_draft,
        mixing=recorded.mixing,
    )


def _draft_models(pair: PairSpec) -> dict[str, str]:
    """The drafts of a pair that are no EAGLE heads."""
    heads = eagle_heads_of(pair)
    return {name: model for name, model in pair.drafts.items() if name not in heads}


def _measure(
    plan: PaperPlan,
    measuring: Remote,
    work: Mapping[str, Mapping[Configuration, int]],
    requests: Mapping[str, Sequence[Request]],
    folder: PapersFolder,
    observer: Observer,
) -> None:
    """Decode every block that is not on disk."""
    blocks = [(key, repeat) for repeat in range(plan.repeats) for key in work]
    missing = [block for block in blocks if not folder.block(*block).exists()]
    done = sum(len(requests[key]) for key, repeat in blocks if (key, repeat) not in missing)
    observer.stage("decoding", sum(len(requests[key]) for key, _ in blocks), done)
    for key, repeat in missing:
        # Counts do not change with the repeat: untimed configurations are decoded once.
        taken = [c for c, times in work[key].items() if repeat < max(times, 1)]
        decoded = partial(_block, measuring, taken, requests[key], repeat, observer)
        folder.save_block(key, repeat, again_if_lost(decoded, observer))


def _block(
    measuring: Remote,
    taken: Sequence[Configuration],
    requests: Sequence[Request],
    repeat: int,
    observer: Observer,
) -> Block:
    """The block of the configurations that are `taken` in the repeat of that number."""
    block = Block()
    measuring.forget()
    for turn, request in enumerate(requests if taken else (), repeat * len(requests)):
        for configuration in interleaved(taken, turn):
            seconds, generation = measuring.decode(configuration, request)
            block.seconds.setdefault(configuration.id, []).append(seconds)
            if not repeat:  # further repeats generate the same
                block.generations.setdefault(configuration.id, []).append(generation)
        observer.step()
    return block


def _differences(
    measuring: Remote,
    work: Mapping[str, Mapping[Configuration, int]],
    requests: Mapping[str, Sequence[Request]],
    folder: PapersFolder,
) -> list[FirstDifference]:
    """Where greedy outputs first differ from autoregressive decoding's."""
    places, cases = [], []
    for key, timed in work.items():
        generations = folder.load_block(key, 0).generations
        for configuration in timed:
            expected = generations.get(Configuration(sampling=configuration.sampling).id)
            exact = configuration.lossless and configuration.sampling.greedy
            if not (expected and exact):
                continue
            for number, own in enumerate(generations[configuration.id]):
                autoregressive = expected[number].tokens
                position = shared(own.tokens, autoregressive)
                if position < min(len(own.tokens), len(autoregressive)):
                    place = {"config_id": configuration.id, "prompts": key}
                    places.append({**place, "prompt": number, "position": position})
                    text = [*requests[key][number].tokens, *autoregressive[:position]]
                    cases.append((text, own.tokens[position], autoregressive[position]))
    gaps = measuring.__ray_call__(
        lambda own: [logit_gap(own.engine.target, *case) for case in cases]
    )
    return [
        FirstDifference(**place, gap=gap, rounding=rounding)
        for place, (gap, rounding) in zip(places, gaps, strict=True)
    ]


def _read(folder: PapersFolder, key: str, work: Mapping[Configuration, int]) -> list[Measured]:
    """The measurements in the blocks of a prompt set."""
    blocks: list[Block] = []
    while folder.block(key, len(blocks)).exists():
        blocks.append(folder.load_block(key, len(blocks)))
    return [
        Measured.of(
            key,
            configuration,
            blocks[0].generations[configuration.id],
            _timing(blocks[:times], configuration) if times else None,
        )
        for configuration, times in work.items()
    ]


def _timing(blocks: Sequence[Block], configuration: Configuration) -> Timing:
    """Against autoregressive decoding in the same repeats."""
    baseline = Configuration(sampling=configuration.sampling)
    ours, theirs = (
        {repeat: block.seconds[each.id] for repeat, block in enumerate(blocks)}
        for each in (configuration, baseline)
    )
    outputs, expected = (blocks[0].generations[each.id] for each in (configuration, baseline))
    against = Timing.of(baseline, theirs, expected), expected
    return Timing.of(configuration, ours, outputs, against)
