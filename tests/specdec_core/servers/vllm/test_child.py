"""A worker answers, or says in one line why not, and never outlives whoever started it."""

import os
import signal
import sys
import time

import pytest

import specdec_core.servers.vllm.worker as vllm_worker
from specdec_core.base.errors import UserError
from specdec_core.servers.vllm.child import Worker
from tests.commands import alive, wait_until

ECHO = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""


@pytest.fixture
def start():
    workers: list[Worker] = []

    def start(script):
        workers.append(Worker("peer", [sys.executable, "-c", script], os.environ))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def test_every_question_gets_its_own_answer(start):
    worker = start(ECHO)
    for number in (1, 2):
        assert worker.ask({"number": number, "long": "x" * 200_000}, 10)["number"] == number


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('first\\nno memory')", "peer: its worker ended: no memory"),
        ("raise SystemExit(3)", "peer: its worker ended: exit status 3"),
        ("print('Hello!'); input(); input()", "peer: its worker answered b'Hello!', .* no JSON"),
        ("print('[1]'); input(); input()", r"peer: its worker answered b'\[1\]', .* no JSON"),
        ('print(\'{"error": "too long"}\'); input(); input()', "peer: too long"),
        ("input(); input()", "peer: did not answer within 0.5 s"),
    ],
)
def test_a_missing_answer_is_one_line_and_stops_the_worker(start, script, message):
    worker = start(script.replace("print(", "import functools; functools.partial(print, flush=1)("))
    with pytest.raises(UserError, match=message):
        worker.ask({}, 0.5 if "within" in message else 10)
    assert not alive(worker._process.pid)


def test_closing_stops_what_the_worker_started_too(start):
    worker = start(
        "import subprocess, json\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print(json.dumps({'child': child.pid}), flush=True)\n"
        "child.wait()"
    )
    child = worker.ask({}, 10)["child"]
    assert alive(child)
    worker.close()
    worker.close()
    wait_until(lambda: not alive(child))


@pytest.mark.parametrize("loading", [False, True], ids=["waiting", "loading"])
def test_no_vllm_worker_outlives_a_parent_that_is_killed(tmp_path, loading):
    """In both of its states: in the read, and in the midst of a library that takes its time."""
    loaded = tmp_path / "loaded"
    (tmp_path / "torch.py").write_text(f"open({str(loaded)!r}, 'w').close()\nwhile True: pass\n")
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:  # no return into pytest from here
        command = [sys.executable, "-P", vllm_worker.__file__]
        worker = Worker("peer", command, os.environ | {"PYTHONPATH": str(tmp_path)})
        os.write(write_end, str(worker._process.pid).encode())
        if loading:
            worker.ask({"engine": {}}, 100)
        signal.pause()
        os._exit(0)
    child = int(os.read(read_end, 20))
    os.close(read_end)
    os.close(write_end)
    while loading and not loaded.exists():
        assert alive(child)
        time.sleep(0.01)
    assert alive(child)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: not alive(child))
