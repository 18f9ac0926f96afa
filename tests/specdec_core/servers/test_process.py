"""A server's process is ready when it answers, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest

from specdec_core.base.errors import UserError
from specdec_core.servers.process import ServerProcess, running
from tests.commands import alive, children, wait_until
from tests.local_server import ending_server

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "100"])
open(sys.argv[2], "w").write(str(child.pid))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ready")
try:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
except KeyboardInterrupt:
    open(sys.argv[2], "w").write("interrupted")
"""


def server(script, *arguments):
    def command(port):
        return [sys.executable, "-c", script, str(port), *map(str, arguments)]

    return ServerProcess("a server", command, os.environ)


def test_it_answers_and_stops_with_its_children(tmp_path):
    process = server(SERVER, tmp_path / "child")
    with running(process) as url:
        assert httpx.get(f"{url}/health").text == "ready"
        child = int((tmp_path / "child").read_text())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    process.stop()  # twice does nothing
    wait_until(lambda: not alive(child))


def test_no_process_of_it_outlives_a_keeper_that_is_killed(tmp_path):
    """As Ray kills the children of a replica that ends."""
    process = server(SERVER, tmp_path / "child")
    with running(process):
        [keeper] = children("keeper.py", recursive=False)
        started = [child.pid for child in keeper.children(recursive=True)]
        assert int((tmp_path / "child").read_text()) in started
        keeper.kill()
        wait_until(lambda: not any(map(alive, started)))
        with pytest.raises(UserError, match="its server ended"):
            process.check()


def test_it_ends_by_itself_where_signals_are_blocked(tmp_path):
    """As below a local Ray, whose processes block what a supervisor sends to all of them."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        with running(server(SERVER, tmp_path / "child")):
            for process in children("keeper.py", recursive=False):
                for each in (process, *process.children(recursive=True)):
                    each.terminate()
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (tmp_path / "child").read_text() == "interrupted"


def test_what_it_prints_is_added_to_its_log(tmp_path):
    """Why it ended is looked for in what its last start has printed."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; print(sys.argv[1]); sys.exit(1)"]
    for said in ("ValueError: no memory", "another reason"):
        process = ServerProcess("a server", lambda _, said=said: [*command, said], os.environ, log)
        with pytest.raises(UserError, match=f"its server ended: {said}"):
            process.start(1)
    assert log.read_text() == "ValueError: no memory\nanother reason\n"


def test_an_error_while_it_is_used_says_why_it_has_ended(tmp_path):
    def asked(process):
        with running(process) as url:
            try:
                httpx.post(url)
            except httpx.HTTPError as error:
                raise UserError(f"{url}: does not answer: {error}") from None

    log = tmp_path / "log"
    with pytest.raises(UserError) as ended:
        asked(ending_server("a server", log))
    assert str(ended.value) == f"a server: its server ended: CudaError: no memory (log: {log})"


def test_a_signal_that_ends_it_is_told():
    dying = "import os, signal; print('loading', flush=True); os.kill(os.getpid(), signal.SIGILL)"
    with pytest.raises(UserError, match="its server ended: SIGILL: Illegal instruction"):
        server(dying).start(1)


def test_one_that_is_not_ready_is_stopped_from_another_thread():
    process = server("import time; time.sleep(1000)")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(process.start, 1)
        wait_until(lambda: children("keeper.py", recursive=False))
        process.stop()
        with pytest.raises(UserError, match="stopped before it was ready"):
            starting.result()


def test_one_that_is_stopped_before_its_process_exists_has_none():
    begun = Event()

    def command(_):
        begun.set()
        time.sleep(0.1)
        return [sys.executable, "-c", "import time; time.sleep(1000)"]

    process = ServerProcess("a server", command, os.environ)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(process.start, 1)
        begun.wait()
        process.stop()
        for start in (starting.result, lambda: process.start(1)):
            with pytest.raises(UserError, match="stopped before it was ready"):
                start()
    assert not children("keeper.py", recursive=False)


def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path):
    starting = (
        "import os, signal, sys\n"
        "from specdec_core.servers.process import ServerProcess, free_port\n"
        "command = lambda port: [sys.executable, '-c', sys.argv[1], str(port), sys.argv[2]]\n"
        "print(ServerProcess('a server', command, os.environ).start(free_port()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", starting, SERVER, str(tmp_path / "child")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    ended = False
    while not ended:  # one that does not end is left to the suite's own limit
        try:
            httpx.get(done.stdout.strip())
        except httpx.ConnectError:
            ended = True


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('error: no such model\\nbye')", "ended: error: no such model"),
        ("raise ValueError('bad dtype')", "ended: ValueError: bad dtype"),
        ("import sys; sys.exit('cannot\\nlisten')", "ended: listen"),
        ("", "ended: it said nothing"),
    ],
)
def test_one_that_ends_says_why_in_a_line(script, message):
    with pytest.raises(UserError, match=f"a server: its server {message}"):
        server(script).start(1)
