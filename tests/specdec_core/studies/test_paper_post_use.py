"""Post-use's tables are computed from recordings and from what the page's tables decoded."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, parse
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.studies.draft_reuse import best_lengths, recycled
from specdec_core.studies.papers.plan import PaperPlan
from specdec_core.studies.papers.post_use import components, phrases, rounds, target_costs
from specdec_core.studies.papers.result import Measured, PapersResult
from specdec_core.studies.papers.studies import Decoded
from tests.specdec_core.recordings.test_record import record, requests

PROMPTS = 4


@pytest.fixture(scope="module")
def greedy(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    folder = tmp_path_factory.mktemp("recording")
    return {"texts": record(tiny_pair, folder, prompts=PROMPTS, max_draft=10)}


@pytest.fixture(scope="module")
def decoded(tiny_pair: Pair) -> Decoded:
    """One chain of the draft, decoded; autoregressive decoding, which has no draft, beside it."""
    row = {"name": "chain", "drafter": {"kind": "draft_model"}}
    table = {"title": "T", "paper": "P", "prompts": ["texts"], "columns": ["mat"], "rows": [row]}
    content = {"prompts": {"texts": {"source": "texts"}}, "tables": {"t": table}}
    chain = DraftModelSettings(draft="draft", policy=FixedSettings(max_tokens=4))
    generations = {
        configuration.id: Engine(tiny_pair, configuration).generate(requests(PROMPTS))
        for configuration in (Configuration(), Configuration(drafter=chain))
    }
    measured = [
        Measured.of("texts", configuration, generations[configuration.id], None)
        for configuration in (Configuration(), Configuration(drafter=chain))
    ]
    result = PapersResult(
        name="r", started=datetime.now(UTC), plan=parse(PaperPlan, content, "here"),
        pair=tiny_pair.spec, sets={}, measured=measured,
    )  # fmt: skip
    return Decoded(result, {"texts": generations})


def test_costs_are_the_forwards_times_of_what_was_decoded(decoded: Decoded) -> None:
    chain = decoded.generations["texts"][decoded.result.measured[1].configuration.id]
    for generation in chain:
        for each in generation.rounds:
            each.draft_forward_seconds, each.target_forward_seconds = 2.0 * each.draft_forwards, 7.0
    assert target_costs(decoded) == {"draft": pytest.approx(3.5)}


def test_tables_are_those_of_each_set_and_draft(
    greedy: dict[str, Recording], decoded: Decoded
) -> None:
    replay, [cost] = Replay(greedy["texts"]), target_costs(decoded).values()
    found, expected = rounds(greedy, decoded), best_lengths(replay, cost)
    assert list(found["length"]) == list(expected.rounds["length"])
    assert set(found["fixed"]) == {expected.fixed}
    assert set(zip(found["prompts"], found["draft"], strict=True)) == {("texts", "draft")}
    assert list(phrases(greedy)["share"]) == list(recycled(replay)["share"])
    with pytest.raises(UserError, match="no chain of a draft model was decoded"):
        rounds(greedy, Decoded(decoded.result, {}))


def test_components_are_timed_on_the_recorded_prompts(
    greedy: dict[str, Recording], tmp_path: Path
) -> None:
    table = components(greedy)
    assert table["share"].sum() == pytest.approx(1)
    assert set(table["tokens"]) == {sum(map(len, greedy["texts"].prompts.outputs))}
    table.to_parquet(tmp_path / "components.parquet")
