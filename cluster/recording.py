"""Recording on all nodes of the cluster: the prompts are divided into shards of a few prompts, and
one actor records a shard.

Actors return their shards through Ray's object store and the driver writes them, so nodes need no
common disk. A shard that is on disk is not recorded again. An actor that dies is started again,
and so is its shard. Several recordings share the actors: a free actor takes the next shard of any.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from pydantic import Field, PositiveInt

from cluster.session import check_nodes, get, ray_session, resources, room, start_actor
from specdec_core.base.errors import UserError
from specdec_core.base.files import NoRoom, locked, needs_room, remove_leftovers
from specdec_core.base.workspace import remember
from specdec_core.config import PairSpec, Sampling, Value
from specdec_core.engine.turns import requests_of
from specdec_core.models.fingerprints import fingerprints
from specdec_core.models.pair import (
    Pair,
    check_pair,
    eagle_heads_of,
    load_pair,
    max_length_of,
    short_drafts,
)
from specdec_core.prompts.conversation import Conversation, conversations
from specdec_core.prompts.prompt_sets import Prompt, PromptSet, load_prompts
from specdec_core.recordings.find import FINISHED, finish, finished
from specdec_core.recordings.observer import RecordingObserver
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.schema import (
    DRAFTS,
    EXAMPLES,
    HEADER,
    PROMPTS,
    Header,
    RecordedSampling,
    Recording,
    Shard,
    read_table,
    save_header,
    shard_file,
    shards,
    write_shard,
)
from specdec_core.search.plan import PromptSource

SHARD = 8  # prompts: the most that a killed recording loses for each actor
_RETRIES = 3  # starts of an actor after it died, and runs of the shard that it had


@dataclass(frozen=True)
class ShardPrompt:
    """A prompt to record: the numbers of its turns in the prompt set, and the tokens of its first
    turn. Later turns follow the target's answers."""

    numbers: range
    prompt: Prompt
    tokens: tuple[int, ...]


Batch = list[ShardPrompt]  # a shard's prompts


class RecordingPlan(Value):
    """What to record."""

    pair: PairSpec = PairSpec()
    prompts: PromptSource = PromptSource(source="bundled:train")
    max_new_tokens: PositiveInt = 128
    sampling: RecordedSampling = Sampling()
    max_draft: PositiveInt = Header.model_fields["max_draft"].default
    continuations: bool = True
    top_k: PositiveInt = Header.model_fields["top_k"].default
    mixing: float = Field(default=Header.model_fields["mixing"].default, ge=0, lt=1)

    def name(self, fingerprints: Mapping[str, str], prompts: PromptSet) -> str:
        """The pair's name, and a digest of the weights, the prompts and the settings: a recording
        depends on all of them."""
        runner = self.pair.runner
        settings = self.model_dump(mode="json", exclude={"pair", "prompts"})
        types = [runner.device, runner.target_dtype, runner.draft_dtype]
        if runner.compile:
            types.append("compile")
        if short := short_drafts(self.pair):
            types.append(json.dumps(short, sort_keys=True))
        content = json.dumps([settings, types, dict(fingerprints), prompts.digest], sort_keys=True)
        return f"{self.pair.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def header(
        self, pair: PairSpec, fingerprints: dict[str, str], prompts: PromptSet, eos: Sequence[int]
    ) -> Header:
        """The header of a recording by this plan."""
        return Header(
            pair=pair,
            fingerprints=fingerprints,
            eos_token_ids=tuple(sorted(eos)),
            prompts=prompts,
            eagle_heads=eagle_heads_of(pair),
            short_drafts=short_drafts(pair),
            **self.model_dump(exclude={"pair", "prompts"}),
        )


@dataclass(frozen=True)
class Planned:
    """A recording to be made or resumed in `folder`. `header` is the header on disk, if any."""

    plan: RecordingPlan
    folder: Path
    fingerprints: dict[str, str]
    prompts: PromptSet
    batches: dict[int, Batch]
    header: Header | None

    @property
    def finished(self) -> bool:
        """Whether the whole recording is on disk."""
        if self.header is None or not finished(self.folder):
            return False
        return not _missing(self.folder, self.header, self.batches)


@dataclass(frozen=True)
class ShardTask:
    """A shard to record: its recording, number and prompts."""

    folder: Path
    spec: PairSpec
    header: Header
    number: int
    batch: Batch


def run_recording(
    plan: RecordingPlan,
    home: Path,
    name: str | None = None,
    out: Path | None = None,
    observer: RecordingObserver | None = None,
) -> Recording:
    """Make or resume the recording of `plan` in the folder that :func:`planned` chooses. Raises
    :class:`UserError` as :func:`planned` and :func:`run_recordings` do."""
    recording = run_recordings([planned(plan, home, name, out)], observer)[0]
    remember(home)
    return recording


def planned(
    plan: RecordingPlan, home: Path, name: str | None = None, out: Path | None = None
) -> Planned:
    """The recording of `plan` in `out`, or else in `<home>/traces/<name>`. The default name depends
    on weights, prompts and settings, so the same call resumes its recording. Prompts of the same
    text are recorded once. Every turn of a conversation is recorded after the target's own greedy
    answers (:func:`specdec_core.engine.turns.requests_of`).

    Raises :class:`UserError` for bad input; nothing is written.
    """
    if not plan.pair.drafts:
        raise UserError(f"{plan.pair.name}: no draft model to record in this pair; give a --draft")
    if name is not None and (name == ".." or Path(name).name != name):
        raise UserError(f"--name {name}: expected a folder's name, not a path")
    tokenizer = check_pair(plan.pair)
    asked = plan.prompts
    prompts = load_prompts(asked.source, asked.limit, tokenizer, asked.chat_template)
    prompt_set = PromptSet.of(asked.source, prompts, asked.chat_template)
    prints = _fingerprints(plan.pair)
    folder = out or home / "traces" / (name or plan.name(prints, prompt_set))
    header = _begun(folder, plan, prints, prompt_set)
    wanted = Planned(plan, folder, prints, prompt_set, _batches(prompts, tokenizer), header)
    if not wanted.finished:
        # Raises for a prompt that is too long for the models, or empty.
        conversations(prompts, tokenizer, plan.max_new_tokens, max_length_of(plan.pair))
    return wanted


def run_recordings(
    wanted: Sequence[Planned], observer: RecordingObserver | None = None
) -> list[Recording]:
    """Make or resume the unfinished recordings, on the same actors, which keep the loaded pair.

    Raises :class:`UserError` for a folder that cannot be written, or in which another process
    records.
    """
    unfinished = {each.folder: each for each in wanted if not each.finished}
    if unfinished:
        _make(list(unfinished.values()), observer or RecordingObserver())
    return [Recording.open(each.folder) for each in wanted]


def _make(wanted: Sequence[Planned], observer: RecordingObserver) -> None:
    with ExitStack() as held:
        for each in wanted:
            with _writing(each.folder):
                held.enter_context(locked(each.folder, "recording"))
        observer.stage("connecting to Ray, loading the pair")
        held.enter_context(ray_session())
        runner = wanted[0].plan.pair.runner
        needs = resources(runner.threads, runner.device)
        first = _start_worker(needs)
        tasks = [task for each in wanted for task in _begin(each, first, observer)]
        if tasks and runner.compile:
            observer.stage("opening compiled graphs, which the first start makes")
            get(first.ready.remote(tasks[0].spec, tasks[0].header))
        total = sum(_count(each.batches.values()) for each in wanted)
        observer.stage("recording", total, total - _count(task.batch for task in tasks))
        left = Counter(task.folder for task in tasks)
        for task, shard in _record(first, needs, tasks):
            with _writing(task.folder):
                write_shard(shard, task.folder, task.number)
                left[task.folder] -= 1
                if not left[task.folder]:
                    finish(task.folder)
            written = shard[PROMPTS]["output"].combine_chunks()
            observer.recorded(len(written), len(written.flatten()))


def _begin(
    wanted: Planned, worker: ray.actor.ActorHandle, observer: RecordingObserver
) -> list[ShardTask]:
    """Write a missing header, delete the leftovers of killed processes and broken shards, and mark
    a finished recording. Returns the missing shards."""
    plan, folder, header = wanted.plan, wanted.folder, wanted.header
    check_nodes(plan.pair)
    spec = plan.pair if header is None else _with_types_of(header.pair, plan.pair)
    spec, eos = get(worker.describe.remote(spec))
    with _writing(folder):
        if header is None:
            header = plan.header(spec, wanted.fingerprints, wanted.prompts, eos)
            save_header(header, folder)
        remove_leftovers(folder, "shard-")
        missing = _missing(folder, header, wanted.batches)
        for number in shards(folder):
            if number in missing or number not in wanted.batches:
                observer.warned(
                    f"shard {number} is broken or of another recording; it is recorded again"
                )
                (folder / FINISHED).unlink(missing_ok=True)
                for part in (PROMPTS, *(p for d in spec.drafts for p in _parts(d))):
                    shard_file(folder, part, number).unlink(missing_ok=True)
        if not missing:
            finish(folder)
    return [ShardTask(folder, spec, header, number, batch) for number, batch in missing.items()]


# The plan


def _fingerprints(spec: PairSpec) -> dict[str, str]:
    """The digest of each model's weights. The weights of a hub model must be loaded first."""
    try:
        return fingerprints(spec)
    except UserError:
        with ray_session():
            worker = _start_worker(resources(spec.runner.threads, spec.runner.device))
            return get(worker.fingerprints.remote(spec))


def _begun(
    folder: Path, plan: RecordingPlan, prints: dict[str, str], prompts: PromptSet
) -> Header | None:
    """The header in `folder`, if any. Raises :class:`UserError` for another recording's folder."""
    if not (folder / HEADER).exists():
        if folder.is_dir() and any(not f.name.startswith(".") for f in folder.iterdir()):
            raise UserError(f"{folder}: holds other files; a recording needs a folder of its own")
        return None
    header = Recording.open(folder).header
    pair = _with_types_of(header.pair, plan.pair)
    planned = plan.header(pair, prints, prompts, header.eos_token_ids)
    differing = [
        field
        for field in Header.model_fields
        if field not in ("pair", "prompts") and getattr(header, field) != getattr(planned, field)
    ]
    if list(header.pair.drafts) != list(plan.pair.drafts):
        differing.append("drafts")
    if header.prompts.digest != prompts.digest:
        differing.append("prompts")
    for field in ("device", "target_dtype", "draft_dtype"):
        if getattr(plan.pair.runner, field) not in ("auto", getattr(header.pair.runner, field)):
            differing.append(field)
    if header.pair.runner.compile != plan.pair.runner.compile:
        differing.append("compile")
    if differing:
        raise UserError(
            f"{folder} holds another recording (other {', '.join(differing)}); give another --name"
        )
    return header


def _with_types_of(recorded: PairSpec, planned: PairSpec) -> PairSpec:
    """`planned` with the device and data types of a recording."""
    types = {name: getattr(recorded.runner, name) for name in ("target_dtype", "draft_dtype")}
    types["device"] = recorded.runner.device
    return planned.model_copy(update={"runner": planned.runner.model_copy(update=types)})


def _batches(prompts: Sequence[Prompt], tokenizer: Any) -> dict[int, Batch]:
    """The shards by number, with one prompt for each text."""
    chosen: dict[tuple[object, ...], ShardPrompt] = {}
    number = 0
    for prompt in prompts:
        asked = Conversation(prompt, tokenizer)
        numbers = range(number, number := number + asked.turns)
        text = (prompt.text, prompt.template, prompt.turns[1 : asked.turns])
        if text not in chosen:
            chosen[text] = ShardPrompt(numbers, prompt, asked.tokens())
    every = list(chosen.values())
    starts = range(0, len(every), SHARD)
    return {number: every[start : start + SHARD] for number, start in enumerate(starts)}


def _count(batches: Iterable[Batch]) -> int:
    """The turns in some shards."""
    return sum(len(asked.numbers) for batch in batches for asked in batch)


def _missing(folder: Path, header: Header, batches: dict[int, Batch]) -> dict[int, Batch]:
    """The shards that are not whole on disk."""
    on_disk = set(shards(folder))
    return {
        number: batch
        for number, batch in batches.items()
        if number not in on_disk or not _whole(folder, number, header, batch)
    }


def _whole(folder: Path, number: int, header: Header, batch: Batch) -> bool:
    """Whether a shard's files can be read and hold the prompts of `batch`."""

    def read(part: str, *columns: str) -> list[np.ndarray]:
        table = read_table(shard_file(folder, part, number), list(columns))
        return [table[column].to_numpy() for column in columns]

    try:
        table = read_table(shard_file(folder, PROMPTS, number), ["prompt", "tokens", "output"])
        rows = zip(table["prompt"].to_pylist(), table["tokens"].to_pylist(), strict=True)
        recorded = dict(rows)
        numbers = [n for asked in batch for n in asked.numbers]
        if list(recorded) != numbers:
            return False
        if any(recorded[asked.numbers[0]] != list(asked.tokens) for asked in batch):
            return False
        lengths = [len(output) for output in table["output"].to_pylist()]
        expected = np.repeat(numbers, lengths)
        for draft in header.pair.drafts:
            prompt, step = read(f"{DRAFTS}/{draft}", "prompt", "step")
            if not np.array_equal(prompt[step == 0], expected):
                return False
            if header.mixing and draft not in header.eagle_heads:  # examples are of draft models
                (prompt,) = read(f"{EXAMPLES}/{draft}", "prompt")
                if not np.array_equal(prompt, expected):
                    return False
    except UserError:
        return False
    return True


def _parts(draft: str) -> tuple[str, str]:
    return f"{DRAFTS}/{draft}", f"{EXAMPLES}/{draft}"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Errors of writing to `folder` become a :class:`UserError`."""
    try:
        with needs_room(folder):
            yield
    except NoRoom:
        raise
    except OSError as error:
        reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        raise UserError(f"{folder}: cannot be written, {reason}") from None


# Actors


class RecordingWorker:
    """Records shards. Loads the pair at the first use and keeps it."""

    def __init__(self) -> None:
        self.pair: Pair | None = None
        self.asked: PairSpec | None = None  # the loaded specification; data types may be "auto"
        self.recorder: Recorder | None = None

    def load(self, spec: PairSpec) -> Pair:
        if self.pair is None or spec not in (self.asked, self.pair.spec):
            self.pair, self.asked = load_pair(spec), spec
        return self.pair

    def fingerprints(self, spec: PairSpec) -> dict[str, str]:
        """The digest of each model's weights."""
        return self.load(spec).fingerprints

    def describe(self, spec: PairSpec) -> tuple[PairSpec, frozenset[int]]:
        """The pair with concrete device and data types, and its end tokens."""
        pair = self.load(spec)
        return pair.spec, pair.eos_token_ids

    def ready(self, spec: PairSpec, header: Header) -> None:
        """Open the models, which makes missing graphs of compiled models."""
        self._opened(spec, header)

    def record(self, spec: PairSpec, header: Header, batch: Batch) -> Shard:
        """Record the prompts of a shard."""
        recorder = self._opened(spec, header)
        pair, engine, requests = recorder.pair, recorder.engine, []
        for asked in batch:
            # Seeds as in every other job, so that sampled outputs are the same.
            first = asked.numbers[0]
            requests += requests_of([asked.prompt], pair, header.max_new_tokens, first, engine)
        return recorder.record([(request.seed, request) for request in requests])

    def _opened(self, spec: PairSpec, header: Header) -> Recorder:
        pair = self.load(spec)
        if self.recorder is None or self.recorder.header != header:
            self.recorder = None  # frees its caches first
            self.recorder = Recorder(pair, header)
        return self.recorder


def _start_worker(needs: dict[str, float]) -> ray.actor.ActorHandle:
    return start_actor(
        RecordingWorker,
        num_cpus=needs["CPU"],
        num_gpus=needs["GPU"],
        max_restarts=_RETRIES,
        max_task_retries=_RETRIES,
    )


def _record(
    first: ray.actor.ActorHandle, needs: dict[str, float], tasks: Sequence[ShardTask]
) -> Iterator[tuple[ShardTask, Shard]]:
    """Record shards with as many actors as the cluster has room for, `first` among them; yields
    the shards as they finish. An actor gets its first shard once it has loaded the pair, so that an
    actor that waits for a busy cluster delays no shard."""
    pending, left = deque(tasks), len(tasks)
    workers = [first]
    workers += [_start_worker(needs) for _ in range(min(room(needs), left) - 1)]
    # Calls under way: reference -> (actor, its shard; None while it loads the pair)
    under_way: dict[ray.ObjectRef, tuple[ray.actor.ActorHandle, ShardTask | None]] = {}
    try:
        if tasks:
            begin = (tasks[0].spec, tasks[0].header)
            under_way = {worker.ready.remote(*begin): (worker, None) for worker in workers}
        while left:
            (done,), _ = ray.wait(list(under_way))
            worker, task = under_way.pop(done)
            result = get(done)
            if pending:
                following = pending.popleft()
                asked = (following.spec, following.header, following.batch)
                under_way[worker.record.remote(*asked)] = (worker, following)
            if task is not None:
                left -= 1
                yield task, result
    finally:
        for reference in under_way:
            ray.cancel(reference)  # else Ray would report calls that it cannot repeat
        for worker in workers:
            ray.kill(worker)
