"""A recording holds what one process would record, whatever happens to the actors and the disk."""

import os
import resource
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import ray
import torch

import cluster.recording
from cluster.recording import RecordingWorker, run_recording
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked
from specdec_core.config import RunnerSettings, Sampling
from specdec_core.engine import Request
from specdec_core.models import pair as pairs
from specdec_core.prompts.source import PromptSource
from specdec_core.recordings.find import find_recording
from specdec_core.recordings.plan import SHARD, RecordingPlan
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.schema import Recording, save_header, shard_file
from tests.commands import children, prompts_file
from tests.observers import Heard
from tests.specdec_core.models.eagle.pair_heads import save_head_of

pytestmark = pytest.mark.usefixtures("ray_running")

# The ninth text is the second one's; 27 others are four shards.
PROMPTS = [f"def add_{i}(a, b): return a + {i}" for i in range(27)]
PROMPTS.insert(8, PROMPTS[1])
PARTS = ("prompts", "drafts/draft", "examples/draft")


@pytest.fixture(scope="module")
def plan(tiny_spec, tmp_path_factory):
    path = prompts_file(tmp_path_factory.mktemp("prompts"), PROMPTS)
    return RecordingPlan(
        pair=tiny_spec, prompts=PromptSource(source=str(path)), max_new_tokens=12, max_draft=6
    )


Recorded = tuple[Recording, Heard]


@pytest.fixture(scope="module")
def recorded(plan, tmp_path_factory):
    heard = Heard()
    return run_recording(plan, tmp_path_factory.mktemp("home"), observer=heard), heard


@pytest.fixture
def copy(recorded, tmp_path):
    """A finished recording that may be damaged, in a home of its own."""
    folder = recorded[0].folder
    return Path(shutil.copytree(folder, tmp_path / "traces" / folder.name))


def tables(folder):
    return {(p, n): pq.read_table(shard_file(folder, p, n)) for p in PARTS for n in range(4)}


def times(folder):
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.parquet")}


def asked(recorder, numbers):
    """The requests of these prompts."""
    encode = recorder.engine.encode
    return [(n, Request(f"prompts/{n}", encode(PROMPTS[n]), 12, seed=n)) for n in numbers]


def test_shards_hold_what_one_process_records_and_a_text_that_comes_twice_once(recorded, tiny_pair):
    recording, heard = recorded
    recorder = Recorder(tiny_pair, recording.header)
    numbers = [n for n in range(len(PROMPTS)) if n != 8]
    requests = asked(recorder, numbers)
    found = tables(recording.folder)
    for shard in range(4):
        expected = recorder.record(requests[shard * SHARD : (shard + 1) * SHARD])
        assert {part: found[part, shard] for part in PARTS} == expected
    assert recording.prompts.numbers == numbers
    assert recording.header.prompts.count == len(PROMPTS)
    assert heard.prompts == len(numbers)
    assert heard.tokens == sum(map(len, recording.prompts.outputs))


def test_a_heads_recording_is_whole_without_examples(plan, tiny_pair, tmp_path):
    save_head_of(tiny_pair, tmp_path / "head", feature_layers=(1,))
    pair = plan.pair.model_copy(update={"drafts": {"eagle": str(tmp_path / "head")}})
    prompts = plan.prompts.model_copy(update={"limit": 3})
    wanted = plan.model_copy(update={"pair": pair, "prompts": prompts})
    recording = run_recording(wanted, tmp_path)
    assert recording.header.mixing
    before, heard = times(recording.folder), Heard()
    assert len(before) == 2  # prompts, and what the head drafts
    assert run_recording(wanted, tmp_path, observer=heard).folder == recording.folder
    assert times(recording.folder) == before
    assert not heard.warnings


def test_the_same_call_finds_a_finished_recording_and_writes_nothing(plan, copy):
    before, heard = times(copy), Heard()
    again = run_recording(plan, copy.parents[1], observer=heard)
    assert (again.folder, heard.prompts, times(copy)) == (copy, 0, before)


def test_missing_broken_and_foreign_shards_alone_are_recorded_again(plan, recorded, copy):
    whole = tables(recorded[0].folder)
    for part in PARTS:  # another shard's files can be read and are of other prompts
        shutil.copy(shard_file(copy, part, 2), shard_file(copy, part, 0))
    rows = shard_file(copy, "drafts/draft", 1)
    rows.write_bytes(rows.read_bytes()[:-100])
    shard_file(copy, "prompts", 3).unlink()  # as if the driver had died before it
    for left in (shard_file(copy, "drafts/draft", 3), copy / "recording.json", copy / "finished"):
        hidden = left.with_name(f".{left.name}.a1b2c3d4")
        hidden.mkdir()
        (hidden / left.name).write_bytes(b"half")
    shutil.copy(shard_file(copy, "prompts", 1), shard_file(copy, "prompts", 7))
    before, heard = times(copy), Heard()
    run_recording(plan, copy.parents[1], observer=heard)
    assert heard.prompts == 8 + 8 + 3
    assert [message.split()[1] for message in heard.warnings] == ["0", "1", "7"]
    assert tables(copy) == whole
    assert [file.name for file in copy.rglob(".*")] == [".lock"]
    after = times(copy)
    kept = {file for file in before if after.get(file) == before[file]}
    assert kept == {shard_file(copy, part, 2) for part in PARTS}
    assert len(after) == 12


def test_killed_actors_are_started_again_with_their_shards(plan, recorded, tmp_path):
    class Killer(Heard):
        killed = 0

        def recorded(self, prompts, tokens):
            super().recorded(prompts, tokens)
            if self.killed:
                return
            for process in children("RecordingWorker"):
                process.kill()
                self.killed += 1

    killer = Killer()
    recording = run_recording(plan, tmp_path, observer=killer)
    assert killer.killed >= 1
    assert killer.prompts == len(PROMPTS) - 1
    assert tables(recording.folder) == tables(recorded[0].folder)


def test_a_process_has_the_data_types_of_the_recording(recorded, tiny_spec, monkeypatch):
    """Also one that Ray starts again on another node, where others are faster."""
    monkeypatch.setattr(pairs, "_faster_dtype", lambda *_: "bfloat16")
    worker = RecordingWorker(tiny_spec.with_runner(target_dtype="auto", draft_dtype="auto"))
    worker.ready(recorded[0].header)
    runner = worker.pair.spec.runner
    assert (runner.target_dtype, runner.draft_dtype) == ("float32", "float32")
    assert worker.pair.target.dtype == torch.float32


def test_a_node_with_other_weights_is_one_line(recorded, tiny_spec):
    header = recorded[0].header
    other = header.model_copy(update={"fingerprints": {**header.fingerprints, "target": "0" * 16}})
    with pytest.raises(
        UserError, match=r"target: other weights on the cluster's node [0-9.]+ than"
    ):
        RecordingWorker(tiny_spec).ready(other)


def test_weights_that_the_driver_lacks_are_known_before_anything_is_loaded(tiny_spec, tiny_pair):
    """A target that is to be split may not fit into one process."""
    worker = RecordingWorker(tiny_spec)
    assert worker.fetched() == tiny_pair.fingerprints
    assert worker.loaded is None


class Sleeper:
    """Records a shard, which is a number of seconds."""

    def ready(self, header):
        pass

    def record(self, header, seconds, answered):
        time.sleep(seconds)
        return seconds


def test_an_actor_without_a_shard_left_leaves_its_room(ray_running, monkeypatch):
    """An actor whose node was lost could not be started again else."""
    events, kill = [], ray.kill
    monkeypatch.setattr(ray, "kill", lambda actor: (events.append("ended"), kill(actor)))
    monkeypatch.setattr(cluster.recording, "room", lambda needs: 2)
    start = ray.remote(num_cpus=0)(Sleeper).remote
    monkeypatch.setattr(cluster.recording, "_start_worker", lambda *_: start())
    header, shards = SimpleNamespace(served=None), {0: 0.5, 1: 3.0}
    for number, _ in cluster.recording._record(start(), {"CPU": 1}, None, header, shards, None):
        events.append(number)
    assert events == [0, "ended", 1, "ended"]


def test_a_process_that_ends_at_each_start_is_one_line(plan, tmp_path, monkeypatch):
    class Ending(RecordingWorker):
        def describe(self):
            os._exit(1)  # as where the kernel kills it for want of memory

    monkeypatch.setattr(cluster.recording, "RecordingWorker", Ending)
    monkeypatch.setattr(cluster.recording, "_RETRIES", 0)
    with pytest.raises(UserError, match=r"^a recording process ended, perhaps for want of memory"):
        run_recording(plan, tmp_path)


@pytest.mark.long
def test_an_actor_that_comes_too_late_for_work_is_not_told_of(plan, tmp_path, monkeypatch, capfd):
    class Late(RecordingWorker):
        def ready(self, header):
            if self.loaded is None:  # the first one has loaded it by now
                (tmp_path / "late").touch()
                time.sleep(600)
            super().ready(header)

    class Waits(Heard):
        def recorded(self, prompts, tokens):
            super().recorded(prompts, tokens)
            while not (tmp_path / "late").exists():
                time.sleep(0.1)

    monkeypatch.setattr(cluster.recording, "RecordingWorker", Late)
    prompts = plan.prompts.model_copy(update={"limit": SHARD + 2})
    waits = Waits()
    run_recording(plan.model_copy(update={"prompts": prompts}), tmp_path, observer=waits)
    assert waits.prompts == SHARD + 1
    time.sleep(2)  # Ray tells of errors as they come to the driver
    assert "ready failed" not in "".join(capfd.readouterr())


def test_what_a_recording_depends_on_is_in_its_name(plan, recorded, copy, tmp_path):
    longer = plan.model_copy(update={"max_draft": 7})
    with pytest.raises(UserError, match=r"another recording \(other max_draft\); .* --name"):
        run_recording(longer, copy.parents[1], copy.name)
    other = prompts_file(tmp_path, PROMPTS[:9])
    fewer = plan.model_copy(update={"prompts": PromptSource(source=str(other))})
    with pytest.raises(UserError, match=r"another recording \(other prompts\)"):
        run_recording(fewer, copy.parents[1], copy.name)
    own, prompts = recorded[0].header.fingerprints, recorded[0].header.prompts
    assert plan.name(own, prompts) == copy.name
    compiled = plan.model_copy(update={"pair": plan.pair.with_runner(compile=True)})
    names = {
        plan.name(own, prompts),
        longer.name(own, prompts),
        plan.name({**own, "draft": "0"}, prompts),
        plan.name(own, prompts.model_copy(update={"digest": "0"})),
        plan.model_copy(update={"mixing": 0}).name(own, prompts),
        compiled.name(own, prompts),
    }
    assert len(names) == 6
    with pytest.raises(UserError, match=r"another recording \(other compile\)"):
        run_recording(compiled, copy.parents[1], copy.name)


def test_recordings_are_found_by_what_they_are_of(recorded, copy):
    header = recorded[0].header
    wanted = {
        "fingerprints": header.fingerprints,
        "prompts_digest": header.prompts.digest,
        "sampling": Sampling(),
        "max_new_tokens": 12,
        "runner": RunnerSettings(target_dtype="float32", draft_dtype="float32"),
    }
    found = find_recording(copy.parent, **wanted)
    assert found.folder == copy
    others = {
        "fingerprints": {**header.fingerprints, "draft": "0"},
        "prompts_digest": "0",
        "sampling": Sampling(temperature=1),
        "max_new_tokens": 13,
        "runner": RunnerSettings(target_dtype="bfloat16", draft_dtype="float32"),
    }
    for key, value in others.items():
        assert find_recording(copy.parent, **{**wanted, key: value}) is None, key
    # Of several, one by the forwards that are to be replayed, though its drafts are shorter.
    by_graphs = copy.parent / "compiled"
    shutil.copytree(copy, by_graphs)
    changes = {"pair": header.pair.with_runner(compile=True), "max_draft": 2}
    save_header(header.model_copy(update=changes), by_graphs)
    for compiled, expected in ((False, copy), (True, by_graphs)):
        runner = wanted["runner"].model_copy(update={"compile": compiled})
        found = find_recording(copy.parent, **{**wanted, "runner": runner})
        assert found.folder == expected
    shutil.rmtree(by_graphs)
    found = find_recording(copy.parent, **{**wanted, "runner": runner})
    assert found.folder == copy
    shutil.copytree(copy, copy.parent / "garbled")
    (copy.parent / "garbled" / "recording.json").write_text("{")
    assert find_recording(copy.parent, **wanted) == found
    # A server's answers, by what may be a copy of the weights here, are replayed by name only.
    save_header(header.model_copy(update={"served": "tiny"}), copy)
    assert find_recording(copy.parent, **wanted) is None
    assert Recording.open(copy).header.replayable
    save_header(header, copy)
    (copy / "finished").unlink()
    assert find_recording(copy.parent, **wanted) is None


def test_a_second_driver_is_kept_out(plan, copy):
    (copy / "finished").unlink()
    with (
        locked(copy, "recording"),
        pytest.raises(UserError, match="this recording is running in another process"),
    ):
        run_recording(plan, copy.parents[1])


def test_a_folder_that_cannot_be_written_is_one_line(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/x: cannot be written, not a directory$"):
        run_recording(plan, tmp_path, out=tmp_path / "file" / "x")
    with pytest.raises(UserError, match=r": holds other files; a recording needs a folder"):
        run_recording(plan, tmp_path, out=tmp_path)


@pytest.mark.long
def test_what_is_on_a_full_disk_stays_whole_and_the_recording_goes_on_with_more_room(
    plan, recorded, tmp_path
):
    room = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filler(Heard):
        def recorded(self, prompts, tokens):
            super().recorded(prompts, tokens)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, room[1]))

    filler, heard = Filler(), Heard()
    try:
        with pytest.raises(UserError, match=r"cannot be written, file too large"):
            run_recording(plan, tmp_path, observer=filler)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert filler.prompts in (SHARD, 3)  # one shard, any of them
    (folder,) = (tmp_path / "traces").iterdir()
    assert not list(folder.rglob(".shard-*"))
    (number,) = {int(file.stem.removeprefix("shard-")) for file in (folder / "prompts").iterdir()}
    kept = {shard_file(folder, part, number) for part in PARTS}
    before = times(folder)
    run_recording(plan, tmp_path, observer=heard)
    assert heard.prompts == len(PROMPTS) - 1 - filler.prompts
    after = times(folder)
    assert {file: after[file] for file in kept} == {file: before[file] for file in kept}
    assert tables(folder) == tables(recorded[0].folder)


def test_of_a_pair_without_drafts_the_outputs_are_recorded(plan, recorded, tmp_path):
    alone = plan.model_copy(update={"pair": plan.pair.model_copy(update={"drafts": {}})})
    found = run_recording(alone, tmp_path)
    expected = recorded[0].prompts.outputs
    assert [each.tolist() for each in found.prompts.outputs] == [e.tolist() for e in expected]
