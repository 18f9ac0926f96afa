"""A scan starts the settings that have their packages installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.scan.study import startable
from specdec_core.config import Configuration, parse
from specdec_core.search.results import Trial
from specdec_core.servers.server import Models
from specdec_core.servers.table import SERVERS

MODELS = Models("org/target", {})
DRAFTERS = [{"kind": "suffix"}, {"kind": "prompt_lookup"}, None]


def test_a_scan_of_vllm_has_suffixes_only_where_their_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path)
    options = [parse(Configuration, {"drafter": drafter}, "test") for drafter in DRAFTERS]
    ranked = [Trial(configuration=option, counts={}, metrics={}) for option in options]
    assert startable(SERVERS["vllm"], MODELS, ranked) == ranked[1:]
    assert "needs the package arctic-inference" in caplog.text
    assert startable(SERVERS["transformers"], MODELS, ranked) == ranked[1:]  # it has no suffixes
    (tmp_path / "lib/python3.12/site-packages/arctic_inference").mkdir(parents=True)
    assert startable(SERVERS["vllm"], MODELS, ranked) == ranked
