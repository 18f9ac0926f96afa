"""What is read off a recording is what the models do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dashboards.evidence import gather, oracle_distances, trajectory
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.results import SweepResult
from tests.dashboards.conftest import NEW_TOKENS, REQUESTS, record


@pytest.fixture(scope="module")
def replay(recorded: Path) -> Replay:
    return Replay(Recording.open(recorded))


def test_tokens_of_the_trajectory_are_accepted_where_the_draft_agrees(
    tiny_pair: Pair, replay: Replay
):
    table = trajectory(replay.track("draft"))
    assert len(table) == len(REQUESTS) * NEW_TOKENS
    prompts = replay.recording.prompts
    sequence = [*prompts.tokens[0], *prompts.outputs[0]]
    with torch.inference_mode():
        logits = tiny_pair.drafts["draft"](torch.tensor([sequence])).logits[0]
    first = len(prompts.tokens[0])
    proposed = logits[first - 1 : -1].argmax(-1).tolist()
    agrees = [a == b for a, b in zip(proposed, sequence[first:], strict=True)]
    assert table["accepted"].iloc[: len(agrees)].tolist() == agrees


def test_the_oracle_drafts_what_is_accepted_when_enough_is_drafted(
    tiny_pair: Pair, result: SweepResult, replay: Replay
):
    fixed = Configuration(
        drafter=DraftModelSettings(draft="draft", policy=FixedSettings(max_tokens=5))
    )
    rounds = [r for g in Engine(tiny_pair, fixed).generate(REQUESTS) for r in g.rounds]
    result.trials = [t for t in result.trials if t.configuration == fixed]
    table = oracle_distances(result, replay)
    assert table["drafted"].tolist() == [r.drafted for r in rounds]
    for oracle, round_ in zip(table["oracle"], rounds, strict=True):
        if round_.accepted < round_.drafted:
            assert oracle == round_.accepted
        else:
            assert oracle >= round_.accepted


def test_each_family_is_shown_with_its_fastest_configuration(result: SweepResult, recorded: Path):
    evidence = gather(result, recorded)
    fixed = [t for t in result.trials if t.configuration.family == "fixed"]
    timed = {t.config_id: t.speedup for t in result.timings}
    best = max((t for t in fixed if t.id in timed), key=lambda t: timed[t.id])
    shown = evidence.distances[["family", "label"]].drop_duplicates()
    labels = dict(shown.itertuples(index=False, name=None))
    assert labels["fixed"] == best.configuration.drafter.label
    assert set(labels) == {"fixed", "heuristic", "confidence", "svip"}


def test_a_recording_without_continuations_tells_about_tokens_alone(
    tiny_pair: Pair, result: SweepResult, tmp_path: Path
):
    evidence = gather(result, record(tiny_pair, tmp_path, continuations=False))
    assert list(evidence.tokens) == ["draft"]
    assert evidence.distances is None
