"""A core has one process, whatever lies in the shared folder for temporary files."""

import os
import tempfile
from multiprocessing import get_context

from cluster.devices import claim_core


def claim(end):
    end.send(claim_core())
    end.recv()


def test_a_core_is_claimed_once_and_free_again_though_pipes_are_planted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cores = sorted(os.sched_getaffinity(0))
    for core in cores:
        os.mkfifo(tmp_path / f"specdec-core-{core}.lock")
    started, claimed = [], []
    for _ in range(len(cores) + 1):
        if len(claimed) == len(cores):
            freed = claimed.pop(0)
            started[0].kill()
            started[0].join()
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(target=claim, args=(theirs,), daemon=True)
        process.start()
        started.append(process)
        assert ours.poll(30), "it waits for a pipe"
        claimed.append(ours.recv())
    for process in started:
        process.kill()
        process.join()
    assert sorted(claimed) == cores
    assert claimed[-1] == freed


def test_a_thread_that_ends_meanwhile_needs_no_core(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads, ended = os.listdir, str(2**22 + 1)  # no thread has a number as high
    monkeypatch.setattr(os, "listdir", lambda folder: [ended, *threads(folder)])
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=claim, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() in os.sched_getaffinity(0)
    process.kill()
    process.join()
