"""BanditSpec's second setting is decoded several requests at once, with lengths as arms."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dashboards.reports.paper_sections.banditspec import BANDITSPEC
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.studies.papers import banditspec
from specdec_core.studies.papers.plan import PaperPlan
from specdec_core.studies.papers.result import PapersResult
from specdec_core.studies.papers.studies import Decoded
from tests.specdec_core.recordings.test_record import record


def decoded(spec: PairSpec) -> Decoded:
    row = {
        "title": "T",
        "paper": "P",
        "prompts": ["x"],
        "columns": ["mat"],
        "rows": [{"name": "A"}],
    }
    table = {**row, "rows": [{"name": "A"}]}
    plan = PaperPlan.model_validate({"prompts": {"x": {"source": "x"}}, "tables": {"t": table}})
    result = PapersResult(
        name="x", started=datetime.now(UTC), plan=plan, pair=spec, sets={}, measured=[]
    )
    return Decoded(result, {})


def test_setting_two_decodes_several_requests_at_once(
    tiny_pair: Pair, tiny_spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {name: record(tiny_pair, tmp_path / name, prompts=3) for name in ("a", "b")}
    batches, generate = [], Engine.generate

    def counted(self, requests):
        batches.append(len(requests))
        return generate(self, requests)

    monkeypatch.setattr(Engine, "generate", counted)
    table = banditspec.together(sets, decoded(tiny_spec))
    entrants = 1 + len(banditspec.LENGTHS) + len(banditspec.BANDITS)
    assert batches == [1] * entrants + [4] * entrants + [2] * entrants  # warm-up, then six prompts
    assert table["name"].tolist()[1:] == ["γ = 1", "γ = 2", "γ = 3", "γ = 4", "EXP3Spec", "UCBSpec"]
    assert set(table["draft"]) == {"draft"}
    assert (table.loc[table["kind"] == "arm", "regret_rounds"] >= 0).all()
    [section] = BANDITSPEC
    assert "6 requests, 4 at once" in section.section(table).note
    assert section.ours(table).startswith("over the best length ")
    few = {"a": record(tiny_pair, tmp_path / "few", prompts=2)}
    with pytest.raises(UserError, match="2 prompts, of which 4 are to be decoded at once"):
        banditspec.together(few, decoded(tiny_spec))
