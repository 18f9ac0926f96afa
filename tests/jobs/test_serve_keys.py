"""`specdec serve keys` shows a key once and keeps its hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cluster.serving.http.access import read_keys
from jobs.serve_keys import main


def test_the_file_has_the_hashes_of_the_keys_that_were_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    for name in ("anne", ""):
        main(path, name)
    keys = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sk-")]
    assert len(set(keys)) == 2
    assert read_keys(path) == tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    assert " anne\n" in path.read_text()
    assert not any(key in path.read_text() for key in keys)
