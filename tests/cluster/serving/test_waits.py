"""Nothing that serves waits for ever."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
WAITS = {"acquire", "communicate", "get", "join", "recv", "result", "wait"}

# Waits without a limit of their own, and what ends them.
BOUNDED = {
    ("stream.py", "self._submission.chunks.get"): "the engine's limit for a step",
    ("answer.py", "task.result"): "it is done",
    ("fleet.py", "task.result"): "it is done",
    ("engine_main.py", "link.recv"): "it ends with its server",
    ("engine_main.py", "self._link.recv"): "it ends with its server",
    ("engine_process.py", "self._link.recv"): "the link's patience",
    ("engine_main.py", "self._messages.get"): "it ends with its server",
    ("engine_main.py", "argument.result"): "its server's limit for a step",
    ("hosts.py", "process.wait"): "the engine ends with its server's connection",
    ("fleet.py", "old.host.wait"): "Ray has no room until then; no thread waits",
    ("served.py", "engine.host.wait"): "Ray has no room until then; no thread waits",
    ("start.py", "host.wait"): "the server is not ready until Ray has room",
    ("keeper.py", "process.wait"): "the command that it runs; `end_with_input` ends that",
    ("served.py", "starting.result"): "it is done",
}


def waits(file):
    """Calls that wait, without a limit."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = node.func.attr in WAITS and not isinstance(node.func.value, ast.Constant)
            if named and not node.args and not node.keywords:
                yield ast.unparse(node.func)


def test_every_wait_has_an_end():
    files = [ROOT / "specdec_core/base/keeper.py", *(ROOT / "cluster/serving").rglob("*.py")]
    found = {(file.name, wait) for file in files for wait in waits(file)}
    assert found == set(BOUNDED)
