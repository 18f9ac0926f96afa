"""Recording on all nodes of the cluster: an actor records a shard of the prompts.

Actors return their shards through Ray's object store and the driver writes them, so nodes need no
common disk. A shard that is on disk is not recorded again. An actor that dies is started again,
and so is its shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from cluster.placed_engine import check_placement
from cluster.placement import Placed, place
from cluster.session import check_nodes, get, ray_session, resources, room, start_actor
from cluster.sharded_target.sharded_pair import load_sharded
from cluster.weights import check_weights
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked, remove_leftovers
from specdec_core.base.observer import Observer
from specdec_core.base.workspace import remember
from specdec_core.config import PairSpec, Placement
from specdec_core.engine.turns import requests_of
from specdec_core.measure.losses import again_if_lost
from specdec_core.models.fingerprints import (
    TARGET,
    fetch_weights,
    fingerprints,
    served_fingerprints,
)
from specdec_core.models.pair import Pair, load_pair
from specdec_core.models.runner import CacheLost
from specdec_core.recordings.find import FINISHED, finish
from specdec_core.recordings.plan import (
    Batch,
    PlannedRecording,
    RecordingPlan,
    count_turns,
    parts_of,
    planned,
    typed,
)
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.schema import (
    HEADER,
    PROMPTS,
    Header,
    Recording,
    Shard,
    save_header,
    shard_file,
    shards,
    write_shard,
)
from specdec_core.servers.answers import (
    Answer,
    ServerAddress,
    asking,
    check_answers,
    open_server,
    served_pair,
)
from specdec_core.servers.completions import AnswerServer

_RETRIES = 3  # starts of an actor after it died, and runs of the shard that it had


def run_recording(
    plan: RecordingPlan,
    home: Path,
    name: str | None = None,
    out: Path | None = None,
    observer: Observer | None = None,
    address: ServerAddress | None = None,
    placement: Placement | None = None,
) -> Recording:
    """Make or resume the recording of `plan` in the folder that
    :func:`specdec_core.recordings.plan.planned` chooses; of the answers of the server at `address`,
    if any; with the models on the devices of `placement`, if any. Raises :class:`UserError` as that
    does, for a folder that cannot be written, for one in which another process records, and for a
    server that does not give the recorded answers."""
    server, clients = None, 1
    with ExitStack() as held:
        if address is not None:
            server = held.enter_context(closing(open_server(address, plan)))
            clients = address.clients
            plan = plan.model_copy(update={"served": server.model})
        wanted = planned(plan, home, partial(weights_of, served=plan.served), name, out)
        if not wanted.finished:
            if server is not None and wanted.header is not None:
                check_answers(server, wanted.folder, plan.max_new_tokens)
            _make(wanted, observer or Observer(), server, clients, placement)
    remember(home)
    return Recording.open(wanted.folder)


def weights_of(spec: PairSpec, served: str | None = None) -> dict[str, str]:
    """The digest of each model's weights; of a `served` target, of its name. A recording process
    downloads the weights of a hub model that are not here, without loading them."""
    try:
        return fingerprints(spec) if served is None else served_fingerprints(spec, served)
    except UserError:
        with ray_session(), _ending():
            needs = resources(spec.runner.threads, spec.runner.device)
            return get(_start_worker(spec, served, needs).fetched.remote())


def _make(
    wanted: PlannedRecording,
    observer: Observer,
    server: AnswerServer | None,
    clients: int,
    placement: Placement | None,
) -> None:
    folder, runner = wanted.folder, wanted.pair.runner
    with _ending(), ExitStack() as held:
        held.enter_context(locked(folder, "recording"))
        observer.stage("connecting to Ray, loading the pair")
        held.enter_context(ray_session())
        check_nodes(wanted.pair)
        if placement is None:
            needs = resources(runner.threads, runner.device)
            first = _start_worker(wanted.pair, wanted.plan.served, needs)
        else:
            check_placement(wanted.pair, placement, ())
            placed = place(placement)
            held.callback(placed.remove)
            needs = {}  # one process, which has its models on the placed devices
            first = _start_worker(wanted.pair, None, {"CPU": 0, "GPU": 0}, placed)
        spec, eos = get(first.describe.remote())
        header = wanted.header
        if header is None:
            header = wanted.plan.header(spec, wanted.fingerprints, wanted.prompts, eos)
            save_header(header, folder)
        missing = _clean(wanted, header, observer)
        if missing and runner.compile:
            observer.stage("opening compiled graphs, which the first start makes")
            get(first.ready.remote(header))
        total = count_turns(wanted.batches.values())
        observer.stage("recording", total, total - count_turns(missing.values()))
        answers = None
        if server is not None:
            features = bool(header.eagle_heads)
            asked = asking(server, clients, missing, header.max_new_tokens, features)
            answers = held.enter_context(asked)
        for number, shard in _record(first, needs, spec, header, missing, answers):
            write_shard(shard, folder, number)
            written = shard[PROMPTS]["output"].combine_chunks()
            observer.recorded(len(written), len(written.flatten()))
        finish(folder)


def _clean(wanted: PlannedRecording, header: Header, observer: Observer) -> dict[int, Batch]:
    """Delete the leftovers of killed processes and broken shards. Returns the missing shards."""
    folder = wanted.folder
    for name in ("shard-", HEADER, FINISHED):
        remove_leftovers(folder, name)
    missing = wanted.missing(header)
    for number in shards(folder):
        if number in missing or number not in wanted.batches:
            observer.warned(
                f"shard {number} is broken or of another recording; it is recorded again"
            )
            (folder / FINISHED).unlink(missing_ok=True)
            for part in parts_of(header):
                shard_file(folder, part, number).unlink(missing_ok=True)
    return missing


@contextmanager
def _ending() -> Iterator[None]:
    """The end of a recording process, again after :data:`_RETRIES` starts, becomes a
    :class:`UserError`."""
    try:
        yield
    except RayActorError:
        raise UserError(
            "a recording process ended, perhaps for want of memory; what is written is kept"
        ) from None


class RecordingWorker:
    """Records shards of a pair, which it loads at the first use: on the devices that are `placed`,
    if any, and without the target's weights for a `served` model."""

    def __init__(
        self, spec: PairSpec, served: str | None = None, placed: Placed | None = None
    ) -> None:
        self.spec, self.served, self.placed = spec, served, placed
        self.loaded: Pair | None = None  # no cached property: its lock could not be pickled
        self.recorder: Recorder | None = None

    @property
    def pair(self) -> Pair:
        if self.loaded is None and self.placed is not None:
            self.loaded = load_sharded(self.spec, self.placed)
        if self.loaded is None:
            served = partial(served_pair, drafts=True, heads=True)
            self.loaded = (load_pair if self.served is None else served)(self.spec)
        return self.loaded

    def fingerprints(self) -> dict[str, str]:
        """The digest of each model's weights."""
        if self.served is not None:
            return served_fingerprints(self.pair.spec, self.served)
        return self.pair.fingerprints

    def fetched(self) -> dict[str, str]:
        """The digests without loading the models, which may need more devices than this process
        has. Weights on the hub are downloaded."""
        target = [self.spec.target] if self.served is None else []
        for model in (*target, *self.spec.drafts.values()):
            fetch_weights(model)
        if self.served is not None:
            return served_fingerprints(self.spec, self.served)
        return fingerprints(self.spec)

    def describe(self) -> tuple[PairSpec, frozenset[int]]:
        """The pair with concrete device and data types, and its end tokens."""
        return self.pair.spec, self.pair.eos_token_ids

    def ready(self, header: Header) -> None:
        """Open the models, which makes missing graphs of compiled models. Raises
        :class:`UserError` where they have other weights here than in the recording."""
        if self.loaded is None:  # a process that Ray started again would measure other data types
            self.spec = typed(self.spec, header)
        if self.recorder is None:
            self._check_weights(header)
            self.recorder = Recorder(self.pair, header)

    def _check_weights(self, header: Header) -> None:
        if self.placed is not None:  # the weights are in other processes, maybe not on this node
            return
        here = self.fingerprints()
        if self.served is not None:
            del here[TARGET]  # it need not be on this node
        check_weights(self.spec, here, header.fingerprints, "the recording")

    def record(self, header: Header, batch: Batch, answers: list[Answer] | None = None) -> Shard:
        """Record the prompts of a shard, or a server's `answers` to them; again, where a process of
        the models is lost meanwhile."""

        def once() -> Shard:
            self.ready(header)
            try:
                return self._record(header, batch, answers)
            except CacheLost:
                self.recorder = None  # each of its runners would raise this once
                raise

        return again_if_lost(once, Observer())

    def _record(self, header: Header, batch: Batch, answers: list[Answer] | None) -> Shard:
        assert self.recorder is not None
        if answers is not None:
            numbered = [(each.request.seed, each.request) for each in answers]
            outputs = [each.tokens for each in answers]
            features = [each.features for each in answers]
            return self.recorder.record(numbered, outputs, features)
        # Seeds as in every other job, so that sampled outputs are the same.
        numbers = [number for asked in batch for number in asked.numbers]
        requests = requests_of(
            [asked.prompt for asked in batch],
            self.pair,
            header.max_new_tokens,
            engine=self.recorder.engine,
            together=not self.pair.drafts,  # else replays are compared with what is decoded alone
        )
        seeded = [replace(each, seed=n) for n, each in zip(numbers, requests, strict=True)]
        return self.recorder.record(list(zip(numbers, seeded, strict=True)))


def _start_worker(
    spec: PairSpec, served: str | None, needs: Mapping[str, float], placed: Placed | None = None
) -> ray.actor.ActorHandle:
    return start_actor(
        RecordingWorker,
        spec,
        served,
        placed,
        num_cpus=needs["CPU"],
        num_gpus=needs["GPU"],
        max_restarts=_RETRIES,
        max_task_retries=_RETRIES,
    )


def _record(
    first: ray.actor.ActorHandle,
    needs: dict[str, float],
    spec: PairSpec,
    header: Header,
    missing: Mapping[int, Batch],
    answers: Callable[[int], list[Answer]] | None,
) -> Iterator[tuple[int, Shard]]:
    """Record shards with as many actors as the cluster has room for, `first` among them; yields
    the shards as they finish. An actor gets its first shard once it has loaded the pair, so that an
    actor that waits for a busy cluster delays no shard. `answers` are a server's, by shard."""
    pending, left = deque(missing.items()), len(missing)
    workers, most = [first], room(needs) if needs else 1
    workers += [_start_worker(spec, header.served, needs) for _ in range(min(most, left) - 1)]
    # Calls under way: reference -> (actor, its shard's number; None while it loads the pair)
    under_way: dict[ray.ObjectRef, tuple[ray.actor.ActorHandle, int | None]] = {}
    try:
        if missing:
            under_way = {worker.ready.remote(header): (worker, None) for worker in workers}
        while left:
            (done,), _ = ray.wait(list(under_way))
            worker, number = under_way.pop(done)
            result = get(done)
            if number is not None:
                left -= 1
                yield number, result  # it is written before answers are waited for
            if pending:
                following, batch = pending.popleft()
                answered = None if answers is None else answers(following)
                call: ray.ObjectRef = worker.record.remote(header, batch, answered)
                under_way[call] = (worker, following)
            else:  # an actor of a node that was lost needs the room
                workers.remove(worker)
                ray.kill(worker)
    finally:
        for reference in under_way:
            ray.cancel(reference)  # else Ray would report calls that it cannot repeat
        for worker in workers:
            ray.kill(worker)
