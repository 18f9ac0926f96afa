"""What is read off a recording is what the models do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dashboards.evidence import gather, oracle_distances, trajectory
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.recordings.confidence_products import prefixes
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.results import SweepResult
from specdec_core.tokens.statistics import Counts
from tests.dashboards.conftest import NEW_TOKENS, REQUESTS, record

LONGEST = 4


@pytest.fixture(scope="module")
def replay(recorded: Path) -> Replay:
    return Replay(Recording.open(recorded))


@pytest.fixture
def result(swept: tuple[SweepResult, Path]) -> SweepResult:
    return swept[0].model_copy(deep=True)


def drafts_from(pair: Pair, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
    """What the draft model writes behind `tokens`, and how probable it finds that."""
    written, probabilities = [], []
    for _ in range(count):
        with torch.inference_mode():
            logits = pair.drafts["draft"](torch.tensor([tokens + written])).logits[0, -1]
        q = logits.float().softmax(-1)
        written.append(int(q.argmax()))
        probabilities.append(float(q.max()))
    return written, probabilities


def test_prefixes_are_what_the_draft_model_writes(tiny_pair: Pair, replay: Replay):
    track, prompts = replay.track("draft"), replay.recording.prompts
    table = prefixes(track, LONGEST)
    expected = []
    for start in range(len(track.position)):
        prompt, position = track.prompt[start], track.position[start]
        if position == 0:
            continue  # nobody drafts in a first round
        output = prompts.outputs[prompt].tolist()
        before = prompts.tokens[prompt].tolist() + output[:position]
        # the last token of an output is always the target's own
        room = min(LONGEST, NEW_TOKENS - position - 1)
        tokens, q = drafts_from(tiny_pair, before, room)
        for length in range(1, room + 1):
            expected.append((
                length,
                float(np.prod(q[:length])),
                tokens[:length] == output[position : position + length],
            ))  # fmt: skip
    assert len(table) == len(expected)
    rows = list(table.itertuples(index=False, name=None))
    assert [(r[0], r[2]) for r in rows] == [(e[0], e[2]) for e in expected]
    assert np.allclose([r[1] for r in rows], [e[1] for e in expected], rtol=1e-4)
    assert 0 < table["accepted"].mean() < 1


def test_tokens_of_the_trajectory_are_accepted_where_the_draft_agrees(replay: Replay):
    track = replay.track("draft")
    table = trajectory(track)
    assert len(table) == len(REQUESTS) * NEW_TOKENS
    # All but the first and the last position of each output.
    ones = prefixes(track, 1)["accepted"]
    inner = (track.position > 0) & (track.position < NEW_TOKENS - 1)
    assert table.loc[inner, "accepted"].tolist() == ones.tolist()
    assert ((table["overlap"] >= 0) & (table["overlap"] <= 1 + 1e-6)).all()


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


def test_runs_have_the_counts_of_decoding(result: SweepResult, recorded: Path):
    evidence = gather(result, recorded)
    fixed, updated, initial, informed = evidence.runs.values()
    k = int(next(iter(evidence.runs)).removeprefix("K="))
    trial = next(
        t
        for t in result.trials
        if t.configuration.family == "fixed" and t.configuration.drafter.policy.max_tokens == k
    )
    counts = Counts(**trial.counts)
    assert fixed["generated"].sum() == counts.n
    assert fixed["draft_forwards"].sum() == counts.n_draft
    assert fixed["request_id"].unique().tolist() == [r.id for r in REQUESTS]
    assert updated["drafted"].tolist() != initial["drafted"].tolist()
    assert informed["drafted"].sum() < initial["drafted"].sum()
    assert set(evidence.families.values()) == {"fixed", "pre_cut"}


def test_pre_cut_is_not_shown_at_a_cost_that_nobody_measured(result: SweepResult, recorded: Path):
    result.profile = result.profile.model_copy(update={"drafts": {}})
    assert set(gather(result, recorded).families.values()) == {"fixed"}


def test_a_recording_without_continuations_tells_about_tokens_alone(
    tiny_pair: Pair, result: SweepResult, tmp_path: Path
):
    evidence = gather(result, record(tiny_pair, tmp_path, continuations=False))
    assert list(evidence.tokens) == ["draft"]
    assert evidence.distances is None
    assert not evidence.prefixes
    assert not evidence.runs
