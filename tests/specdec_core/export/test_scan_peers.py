"""A scan starts what the program can be started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_core.config import Configuration, parse
from specdec_core.export.scan_peers import startable
from specdec_core.export.servers import SERVERS
from specdec_core.search.results import Trial

DRAFTERS = [{"kind": "suffix"}, {"kind": "prompt_lookup"}, None]


def test_a_scan_of_vllm_has_suffixes_only_where_their_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specdec_core.evidence.peers.vllm.VENV", tmp_path)
    options = [parse(Configuration, {"drafter": drafter}, "test") for drafter in DRAFTERS]
    ranked = [Trial(configuration=option, counts={}, metrics={}) for option in options]
    assert startable(SERVERS["vllm"], ranked) == ranked[1:]
    assert "suffix decoding does not take part" in caplog.text
    assert startable(SERVERS["transformers"], ranked) == ranked
    (tmp_path / "lib/python3.12/site-packages/arctic_inference").mkdir(parents=True)
    assert startable(SERVERS["vllm"], ranked) == ranked
