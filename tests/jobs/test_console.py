"""Whatever ends a command says so."""

import errno
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import session
from cluster.session import ray_session
from jobs.console import interruptible, serve_command
from specdec_core.search.load.workload import Workload


@pytest.fixture
def start_ray(monkeypatch):
    """Have Ray, which a real command may use in this process, start by a function. Ctrl-C is what
    it is in a new process."""

    def start(init):
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(session, "_end_local", lambda: None)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield start
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("starting", [True, False])
def test_a_command_that_is_terminated_says_so_also_while_it_uses_ray(
    starting, command, tmp_path, start_ray
):
    def init(**_):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Ray's own ends without a word
        if starting:
            os.kill(os.getpid(), signal.SIGTERM)

    start_ray(init)

    def main() -> None:
        with interruptible(), ray_session():
            os.kill(os.getpid(), signal.SIGTERM)

    done = command(main, tmp_path)
    assert done.returncode == 143
    assert done.stderr == "terminated; the same command resumes\n"


def test_a_ray_that_does_not_start_is_one_line(command, tmp_path, start_ray):
    def init(**_):
        raise Exception("The node timed out during startup. It may be\noverloaded.")  # as Ray does

    start_ray(init)

    def main() -> None:
        with ray_session():
            pass

    done = command(main, tmp_path)
    reason = "The node timed out during startup. It may be overloaded."
    assert (done.returncode, done.stderr) == (2, f"error: Ray did not start: {reason}\n")


def test_ctrl_c_while_ray_forks_is_not_lost_and_leaves_no_lock_taken(command, tmp_path, start_ray):
    lock: Any = vars(logging)["_lock"]

    interrupts = []

    class Fork:
        def __del__(self):  # errors in it are dropped, as around a fork
            lock.acquire()  # as `logging` does there
            interrupts.append(signal.getsignal(signal.SIGINT))
            signal.raise_signal(signal.SIGINT)
            lock.release()

    start_ray(lambda **_: bool(Fork()))

    def main() -> None:
        with interruptible(), ray_session():
            pass

    try:
        done = command(main, tmp_path)
        assert len(interrupts) == 1
        assert done.returncode == 130
        assert done.stdout == "interrupted; the same command resumes\n"
        logger = threading.Thread(target=logging.getLogger, args=("another",), daemon=True)
        logger.start()
        logger.join(10)
        assert not logger.is_alive()
    finally:
        with suppress(RuntimeError):  # it is not taken
            lock.release()


def test_a_wait_that_ends_with_another_code_was_terminated_all_the_same(command, tmp_path):
    def main() -> None:
        with interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except SystemExit:
                sys.exit(1)  # as Ray does

    done = command(main, tmp_path)
    assert done.returncode == 143
    assert done.stderr == "terminated; the same command resumes\n"


def test_a_pipe_to_another_process_that_breaks_is_one_line(command, tmp_path):
    def main() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    done = command(main, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: another process is gone ([Errno 32] Broken pipe, ")
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_the_system_refuses_is_one_line_and_a_missing_one_is_a_fault(
    command, tmp_path, monkeypatch
):
    def main(file: Path) -> None:
        file.read_text()

    done = command(main, tmp_path, tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}: is a directory\n")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # it becomes another one
    with pytest.raises(FileNotFoundError):
        command(main, tmp_path, tmp_path / "nothing")


def test_output_that_nobody_reads_is_no_error(command, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("jobs.console._OUTPUT", writer)

    def main() -> None:
        os.write(writer, b"text")

    done = command(main, tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_next_command_serves_a_slot_for_every_client_of_the_workload():
    assert serve_command(Workload(clients=(1, 16, 4))).endswith("specdec serve --slots 16")
    assert serve_command(Workload(rate=3)).endswith("serve --slots 16")  # as it was simulated
    assert serve_command(None).endswith("specdec serve")
