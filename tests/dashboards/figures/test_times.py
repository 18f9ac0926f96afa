"""The regression finds the times that were put in, and every live generation is in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dashboards.figures.times import generation_times, regression_table, time_regression
from specdec_core.search.results import SweepResult


@pytest.fixture
def result(swept: tuple[SweepResult, Path]) -> SweepResult:
    return swept[0]


@pytest.fixture
def rounds(swept: tuple[SweepResult, Path]) -> pd.DataFrame:
    return pd.read_parquet(swept[1] / "rounds.parquet")


def generations(t_draft: float, t_target: float, noise: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({
        "family": ["fixed", "svip"] * 40,
        "draft": "small",
        "n_draft": rng.integers(50, 300, 80),
        "n_target": rng.integers(20, 100, 80),
    })  # fmt: skip
    exact = t_draft * table["n_draft"] + t_target * table["n_target"]
    return table.assign(seconds=exact * (1 + noise * rng.normal(size=80)))


def test_a_generation_is_the_sum_of_its_rounds(result, rounds):
    table = generation_times(result, rounds)
    assert len(table) == len(rounds.groupby(["config_id", "request_id"]))
    fixed = result.trials[1]
    of_fixed = table[table["config_id"] == fixed.id]
    assert of_fixed["n_draft"].sum() == fixed.counts["n_draft"]
    # A prompt's first round is its prefill.
    assert of_fixed["n_target"].sum() == fixed.counts["n_target"] - fixed.counts["requests"]
    assert set(of_fixed["family"]) == {"fixed"}
    assert set(of_fixed["draft"]) == {"draft"}
    columns = ["draft_seconds", "target_seconds", "other_seconds"]
    after_first = (rounds["config_id"] == fixed.id) & (rounds["round"] > 0)
    spent = rounds.loc[after_first, columns].to_numpy().sum()
    assert of_fixed["seconds"].sum() == pytest.approx(spent)


def test_replayed_rounds_are_left_out(result, rounds):
    replayed = rounds["config_id"] == result.trials[1].id
    rounds.loc[replayed, ["draft_seconds", "target_seconds", "other_seconds"]] = 0.0
    assert result.trials[1].id not in set(generation_times(result, rounds)["config_id"])


def test_the_table_recovers_the_times_and_says_how_well_they_fit():
    table = regression_table(generations(0.002, 0.01)).set_index("setting")
    assert list(table.index) == ["fixed K", "SVIP", "all"]
    assert np.allclose(table["t_draft (ms)"], 2)
    assert np.allclose(table["t_target (ms)"], 10)
    assert np.allclose(table["R²"], 1)
    assert table.loc["all", "generations"] == 80
    noisy = regression_table(generations(0.002, 0.01, noise=0.1)).set_index("setting")
    assert 0.5 < noisy.loc["all", "R²"] < 0.999


def test_settings_too_alike_to_tell_the_times_apart_are_left_out():
    table = generations(0.002, 0.01)
    table.loc[table["family"] == "fixed", ["n_draft", "n_target", "seconds"]] = [100, 20, 0.4]
    assert list(regression_table(table)["setting"]) == ["SVIP", "all"]


def test_points_lie_where_measured_and_predicted():
    table = generations(0.002, 0.01)
    figure = time_regression(table)
    points = [t for t in figure.data if t.mode == "markers"]
    assert sorted(t.name for t in points) == ["SVIP", "fixed K"]
    measured = np.concatenate([t.x for t in points])
    assert np.allclose(np.sort(measured), np.sort(1e3 * table["seconds"]))
    assert all(np.allclose(t.x, t.y) for t in points)
    assert "t_draft 2.00 ms and t_target 10.00 ms" in figure.layout.title.text
    assert "R² 1.000" in figure.layout.title.text


def test_many_generations_are_thinned_but_all_fitted():
    table = pd.concat([generations(0.002, 0.01)] * 20, ignore_index=True)
    figure = time_regression(table, most=100)
    assert sum(len(t.x) for t in figure.data if t.mode == "markers") == 100
    assert figure.data == time_regression(table, most=100).data


def test_a_sweep_of_real_generations_is_drawn(result, rounds):
    table = generation_times(result, rounds)
    figure = time_regression(table)
    drawn = {t.name for t in figure.data if t.mode == "markers"}
    assert {"fixed K", "confidence", "SVIP"} <= drawn


def test_no_live_generation_is_an_empty_figure():
    figure = time_regression(generations(0.002, 0.01).iloc[:0])
    assert len(figure.data) == 0
