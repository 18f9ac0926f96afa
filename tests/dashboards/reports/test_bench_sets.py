"""A benchmark's tables by prompt set."""

from __future__ import annotations

import pytest

from dashboards.outputs.markdown import part
from dashboards.reports.bench import sections
from specdec_core.evidence.bench.result import BenchResult
from tests.specdec_core.evidence.bench.test_sets import race


@pytest.fixture
def shown(bench_result: BenchResult) -> dict[str, str]:
    return {section.key: part(section) for section in sections(race(bench_result))}


def test_every_prompt_set_has_its_speeds_ratios_and_accepted_lengths(
    shown: dict[str, str],
) -> None:
    table = shown["sets_0"]
    assert "| chat (2) tokens/s | chat (2) over our autoregressive | chat (2) MAT |" in table
    (svip,) = (line for line in table.splitlines() if line.startswith("| SVIP |"))
    assert svip.startswith("| SVIP | 20 | 4.00× |")
    (fastest,) = (line for line in table.splitlines() if line.startswith("| other draft |"))
    assert "| **20.00×** |" in fastest
