"""SVIP's figures and tables from recordings say what the recordings hold."""

import numpy as np
import pandas as pd
import pytest

from research.long_form.study import measure_long_form
from research.papers import svip
from research.papers.sections.svip import SVIP
from research.papers.studies import LONG_FORM, LONG_FORM_GREEDY, TIMES
from specdec_core.config import Configuration, Sampling
from specdec_core.recordings.replay import Replay
from tests.research.papers.exhibits import drawn
from tests.specdec_core.cost.examples import constant_profile
from tests.specdec_core.recordings.test_record import record

MOST = 8  # candidates that are recorded; texts have 40 tokens
PROFILE = constant_profile(1.0, 0.5)


@pytest.fixture(scope="module")
def greedy(tiny_pair, tmp_path_factory):
    return {"code": record(tiny_pair, tmp_path_factory.mktemp("greedy"), max_draft=MOST)}


@pytest.fixture(scope="module")
def sampled(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    return {"code": record(tiny_pair, folder, sampling=Sampling(temperature=1), max_draft=MOST)}


@pytest.fixture(scope="module")
def long_form(tiny_pair):
    chain = {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 0.3, "max_tokens": 4}}
    asked = [Configuration.model_validate({"drafter": chain})]
    return measure_long_form(tiny_pair, asked, [(5, 6, 7), (8, 9)], (16, 32))


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr(svip, "LEAST", 1)
    shorter = {
        name: {**policy, "max_tokens": min(policy["max_tokens"], MOST)}
        for name, policy in svip.POLICIES.items()
    }
    monkeypatch.setattr(svip, "POLICIES", shorter)


def texts(sets):
    """The places of each text in its track, and the track."""
    [recording] = sets.values()
    track = Replay(recording, hidden=False, drawn=True).track()
    return [(np.flatnonzero(track.prompt == n), track) for n in np.unique(track.prompt)]


def test_the_oracle_ends_a_round_at_each_rejection(sampled):
    runs = []
    for places, track in texts(sampled):
        rejected = np.flatnonzero(~track.trace.agrees[places][1:])
        runs += list(np.diff(np.concatenate([[-1], rejected])) - 1)
    table = svip.oracle_lengths({}, sampled, {})
    assert table["rounds"].sum() == len(runs)
    mean = (table["mean"] * table["rounds"]).sum() / len(runs)
    assert mean == pytest.approx(np.mean(runs))
    assert (table["variance_low"] <= table["variance_high"]).all()


def test_divergence_is_of_the_rejected_token_and_of_those_before_it(sampled):
    expected: dict[int, list[float]] = {offset: [] for offset in range(-4, 1)}
    for places, track in texts(sampled):
        trace = track.trace
        rows = trace.trajectory[places]
        kl = np.maximum(trace.cross_entropy[rows].astype(float) - trace.entropy[rows], 0)
        agrees = trace.agrees[places]
        for place in np.flatnonzero(~agrees):
            if place >= 4 and agrees[place - 4 : place].all():
                for offset, values in expected.items():
                    values.append(float(kl[place + offset]))
    table = svip.divergence_before_rejections(sampled).set_index("offset")
    assert (table["rejections"] == len(expected[0])).all()
    for offset, values in expected.items():
        assert table.loc[offset, "kl"] == pytest.approx(
            np.mean(values) if values else np.nan, nan_ok=True
        )


def test_a_long_agreeing_stretch_counts_once_in_figure_7_as_in_figure_1(sampled):
    [recording] = sampled.values()
    track = texts(sampled)[0][1]
    _, starts, lengths = svip._oracle_rounds(track)
    free = track.room[starts] >= recording.header.max_draft
    table = svip.lengths(sampled)
    for _, row in table[table["policy"].str.startswith("Constant")].iterrows():
        drafted = float(row["policy"].removeprefix("Constant, K="))
        assert drafted - row["delta"] == pytest.approx(lengths[free].mean())


def test_a_speedup_is_that_of_the_rounds_counts(sampled):
    table = svip.speedups(sampled, sampled, PROFILE)
    assert list(dict.fromkeys(table["prompts"])) == ["code", "code, long"]
    [(_, rounds), *_] = svip._replayed(sampled["code"], svip.POLICIES)
    counts = rounds.counts
    spent = counts.n_target + 0.5 * counts.n_draft
    assert table["speedup"][0] == pytest.approx(counts.n / spent)
    assert table["tokens"][0] == np.mean([len(o) for o in sampled["code"].prompts.outputs])


def test_every_section_is_drawn_from_its_table(greedy, sampled, long_form, tmp_path):
    recorded = {"greedy": greedy, "sampled": sampled, "long": sampled}
    long_texts = {LONG_FORM: long_form, LONG_FORM_GREEDY: long_form}
    for table in drawn(SVIP, {**recorded, **long_texts, TIMES: PROFILE}).values():
        table.to_parquet(tmp_path / "table.parquet", index=False)
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)
