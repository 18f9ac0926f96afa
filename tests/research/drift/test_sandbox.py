"""A program that a model wrote passes only by ending by itself, and reaches nothing outside."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from research.drift import sandbox
from research.drift.sandbox import check_sandbox, succeeds

try:
    check_sandbox()
except Exception as error:  # whatever this machine does not allow
    pytest.skip(str(error), allow_module_level=True)


def test_only_a_program_that_comes_to_its_end_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert succeeds("import math\nassert math.comb(5, 2) == 10\nprint('x' * 10)")
    assert not succeeds("assert 1 == 2")
    assert not succeeds("import sys; sys.exit(0)")
    assert not succeeds("import os; os._exit(0)")
    assert not succeeds("x = [0] * (1 << 29)")  # 4 GB
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    monkeypatch.setattr(sandbox, "_SETTING_UP", 0)
    assert not succeeds("import time; time.sleep(60)")


def test_a_program_reaches_no_file_no_network_and_no_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not succeeds(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
    kept = tmp_path / "kept"
    kept.write_text("kept")
    assert succeeds(f"assert open({str(kept)!r}).read() == 'kept'")
    for attempt in (f"open({str(kept)!r}, 'w')", f"import os; os.unlink({str(kept)!r})"):
        assert not succeeds(attempt)
    assert kept.read_text() == "kept"
    assert succeeds(
        "import os; assert sorted(n for n in os.listdir('/proc') if n.isdigit()) == ['1']"
    )
    assert succeeds("import os; assert not os.environ.get('HOME')")
