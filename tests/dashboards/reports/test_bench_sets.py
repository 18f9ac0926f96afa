"""A benchmark's tables by prompt set, and those of draft lengths."""

from __future__ import annotations

import pytest

from dashboards.outputs.markdown import part
from dashboards.reports.bench import findings, sections
from specdec_core.evidence.bench.result import BenchResult, OracleLimit
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


def test_fixed_and_adaptive_lengths_stand_side_by_side_in_every_set(
    shown: dict[str, str],
) -> None:
    lines = [line for line in shown["lengths_0"].splitlines() if line.startswith("|")]
    assert lines[0].endswith("| over the best fixed | chat | gsm8k | other | mt_bench |")
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["**K=4**", "K=2", "SVIP"]
    assert lines[-1].startswith("| SVIP | 1.50 | 0.50 |")
    assert lines[-1].endswith("| 2.00× | 1.00× | 1.25× | 1.00× |")


def test_the_best_adaptive_length_and_the_oracle_are_told(bench_result: BenchResult) -> None:
    result = race(bench_result)
    (line,) = (line for line in findings(result) if "fixed length" in line)
    assert line.startswith("temperature 0: SVIP is 1.00×")
    assert line.endswith(
        "the best fixed length, K=4 (both chosen on 4 prompts, compared on the 4 others)"
    )
    for own in result.rows[2:]:
        for take in own.takes[0]:
            take.effort.seconds |= {"prefill": 0.0}
    # K = 4 takes 0.1125 s a token.
    draft = next(iter(result.pair.drafts))
    oracle = OracleLimit(draft=draft, verification_rate=0.2, seconds_per_token=0.1125 / 2)
    told = findings(result.model_copy(update={"oracles": [oracle]}))
    assert any(line.endswith("; a chain that always stops in time would be 2.00× that")
               for line in told)  # fmt: skip


def test_a_draft_s_forward_is_told_as_a_share_of_the_target_s(bench_result: BenchResult) -> None:
    (forwards,) = (section for section in sections(bench_result) if section.key == "forwards")
    (target, draft) = forwards.shown["÷ target"]
    times = bench_result.forwards
    (name,) = bench_result.pair.drafts
    assert target == "1.000"
    assert draft == f"{times[name].seconds[1] / times['target'].seconds[1]:.3f}"
