"""The figures say what the sweep found."""

import re

import numpy as np
import plotly.graph_objects as go
import pytest

from dashboards import look, ranking
from dashboards.figures.frontier import chain_speedup, frontier, pareto
from dashboards.figures.heads import reliability_diagram
from dashboards.figures.sweep import _milliseconds, speedups, time_per_token
from dashboards.reports.heads import fits
from specdec_core.config import Configuration, Sampling
from specdec_core.config.kinds import DRAFTERS, POLICIES
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.policies.confidence import (
    ConfidenceProductSettings,
    ConfidenceSettings,
    SvipSettings,
)
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.oracle import OracleSettings
from specdec_core.search.results import Trial
from specdec_core.tokens.statistics import Counts


def draw_all(result):
    return {
        "frontier": frontier(result),
        "speedups": speedups(result),
        "time": time_per_token(result),
    }


def scatters(figure):
    return [trace for trace in figure.data if trace.type == "scatter"]


def test_every_figure_has_a_title_and_names_its_axes(result):
    for name, figure in draw_all(result).items():
        assert figure.layout.title.text, name
        assert figure.layout.title.subtitle.text, name
        assert len(figure.data) > 0, name
        axes = [*figure.select_xaxes(), *figure.select_yaxes()]
        titled = [axis for axis in axes if axis.title.text]
        # bars are named by the configuration, which needs no axis name
        assert len(titled) == len(axes) - (name in ("speedups", "time")), name


def test_frontier_shows_every_drafting_configuration_once(result):
    drawn = [
        (x, y)
        for trace in scatters(frontier(result))
        if trace.mode in ("lines+markers", "markers") and not trace.name.startswith("oracle")
        for x, y in zip(trace.x, trace.y, strict=True)
    ]
    expected = [
        (t.metrics["discard_rate"], t.metrics["verification_rate"])
        for t in result.trials
        if t.configuration.drafter is not None
    ]
    assert sorted(drawn) == sorted(expected)
    (oracle,) = [t for t in frontier(result).data if t.name == "oracle"]
    assert (list(oracle.x), list(oracle.y)) == ([0], [0.1])


@pytest.fixture
def crowded(result):
    """A result with 1,200 configurations of three families."""
    rng = np.random.default_rng(0)
    for i in range(1200):
        threshold = round(0.1 + i / 2000, 4)
        policy = (
            ConfidenceSettings(threshold=threshold),
            SvipSettings(threshold=threshold),
            ConfidenceProductSettings(threshold=threshold),
        )[i % 3]
        discard = float(rng.uniform(0.05, 2))
        metrics = {
            "discard_rate": discard,
            "verification_rate": float(0.2 + 0.1 / discard + rng.uniform(0, 0.4)),
            "mat": 3.0, "acceptance_rate": 0.5, "utilisation": 0.7, "estimated_speedup": 0.9,
        }  # fmt: skip
        configuration = Configuration(drafter=DraftModelSettings(draft="draft", policy=policy))
        result.trials.append(
            Trial(configuration=configuration, counts=result.trials[1].counts, metrics=metrics)
        )
    return result


def test_a_frontier_of_a_thousand_configurations_keeps_every_front_and_some_of_the_rest(crowded):
    figure = frontier(crowded)
    traces = [t for t in scatters(figure) if t.mode in ("lines+markers", "markers")]
    points = [(t, *p) for t in traces for p in zip(t.x, t.y, strict=True)]
    assert len(points) < 700
    numbers = re.search(
        r"Of (\d+) configurations (\d+) that lie", figure.layout.title.subtitle.text
    )
    drafting = len(ranking.ranked(crowded))
    stars = sum(t.name == "oracle" for t in traces)
    assert (int(numbers[1]), int(numbers[2])) == (drafting, drafting - len(points) + stars)
    for kind in ("confidence", "svip", "confidence_product"):
        members = [t for t in crowded.trials if t.configuration.family == kind]
        front = [
            (t.metrics["discard_rate"], t.metrics["verification_rate"]) for t in pareto(members)
        ]
        name = look.style(kind).name
        (line,) = [t for t in traces if t.name == name and t.mode == "lines+markers"]
        assert list(zip(line.x, line.y, strict=True)) == front
        (faint,) = [t for t in traces if t.name == name and t.mode == "markers"]
        assert faint.opacity < 0.3 < line.opacity
    assert figure.data == frontier(crowded).data  # the same every time


def test_the_oracle_as_a_configuration_is_a_mark_alone(result):
    oracle = Configuration(drafter=DraftModelSettings(draft="draft", policy=OracleSettings()))
    best = result.trials[1].model_copy(deep=True)
    best.metrics |= {"discard_rate": 0.0, "estimated_speedup": 99.0}
    result.trials.append(best.model_copy(update={"configuration": oracle}))
    assert oracle.id not in {t.id for t in ranking.ranked(result)}
    assert oracle.id not in speedups(result).layout.yaxis.tickvals


def test_a_frontier_keeps_what_nothing_beats_in_both_rates():
    def trial(discard, verification):
        metrics = {"discard_rate": discard, "verification_rate": verification}
        return Trial(configuration=Configuration(), counts={}, metrics=metrics)

    points = [(0.5, 0.3), (0.2, 0.5), (0.6, 0.4), (0.9, 0.2), (0.2, 0.6)]
    front = pareto([trial(*p) for p in points])
    rates = [(t.metrics["discard_rate"], t.metrics["verification_rate"]) for t in front]
    assert rates == [(0.2, 0.5), (0.5, 0.3), (0.9, 0.2)]


def test_lines_of_equal_latency_agree_with_the_estimates(result):
    trial = next(t for t in result.trials if t.configuration.family == "fixed")
    profile, counts = result.profile, trial.counts
    n = counts["n"]
    # the last verification of a request may throw its own token away; compare where it did not
    assert counts["n_draft"] + counts["n_target"] == n + counts["n_discarded"]
    rates = np.array([counts["n_discarded"], counts["n_target"]]) / n
    predicted = chain_speedup(profile, "draft", *rates)
    assert predicted == pytest.approx(trial.metrics["estimated_speedup"], rel=1e-6)
    (lines,) = [trace for trace in frontier(result).data if trace.type == "contour"]
    drawn = [[chain_speedup(profile, "draft", x, y) for x in lines.x] for y in lines.y]
    assert np.allclose(lines.z, drawn)


def test_timed_bars_are_solid_with_intervals_and_estimated_ones_are_lighter(result):
    bars = [t for t in speedups(result).data if isinstance(t, go.Bar)]
    timed = {t.config_id: t for t in result.timings}
    seen = set()
    for bar in bars:
        for i, config in enumerate(bar.y):
            seen.add(config)
            if config in timed:
                assert bar.marker.opacity[i] == 1
                assert bar.x[i] + bar.error_x.array[i] == pytest.approx(timed[config].high)
                assert bar.x[i] - bar.error_x.arrayminus[i] == pytest.approx(timed[config].low)
            else:
                assert bar.marker.opacity[i] < 0.5
                assert np.isnan(bar.error_x.array[i])
    assert seen == {t.id for t in result.trials if t.configuration.drafter is not None}


def test_bars_of_a_large_sweep_show_what_was_timed_and_every_family(crowded):
    figure = speedups(crowded)
    shown = set(figure.layout.yaxis.tickvals)
    assert len(shown) == 24
    assert {t.config_id for t in crowded.timings} <= shown
    drafting = ranking.ranked(crowded)
    by_id = {t.id: t for t in drafting}
    families = {ranking.family(t) for t in drafting}
    assert {ranking.family(by_id[i]) for i in shown} == families


def test_a_title_counts_ties_with_the_champion_that_it_names(result):
    assert speedups(result).layout.title.text.endswith("; 1 more cannot be told from it")
    result.champion = result.autoregressive.config_id  # tied with what the title names
    assert speedups(result).layout.title.text.endswith("times as fast as autoregressive")


def test_time_of_a_token_adds_up_to_the_estimate(result):
    bars = [t for t in time_per_token(result).data if isinstance(t, go.Bar)]
    total: dict[str, float] = {}
    for bar in bars:
        for config, milliseconds in zip(bar.y, bar.x, strict=True):
            total[config] = total.get(config, 0) + milliseconds
    trial = result.champion_trial
    seconds = result.profile.estimate_seconds(Counts(**trial.counts), "draft") / trial.counts["n"]
    assert total[result.champion] == pytest.approx(1e3 * seconds)


def test_forwards_whose_level_of_a_tree_was_accepted_are_not_thrown_away(result):
    trial = result.champion_trial
    counts = {"n": 5, "n_target": 1, "n_draft": 4, "n_drafted": 12, "n_draft_tokens": 10}
    counts |= {"n_accepted": 4, "n_discarded": 8}
    for each in (counts, {**counts, "n_draft_kept": 4}):  # of older sweeps, and of this one
        _, kept, wasted, _ = _milliseconds(result, trial.model_copy(update={"counts": each}))
        assert kept > 0
        assert wasted == 0


def test_forwards_whose_tokens_were_rejected_are_thrown_away_beside_a_lookup(result):
    counts = {"n": 700, "n_target": 150, "n_draft": 300, "n_drafted": 800, "n_draft_tokens": 300}
    counts |= {"n_accepted": 400 + 150, "n_discarded": 250, "n_draft_kept": 150}
    trial = result.champion_trial.model_copy(update={"counts": counts})
    _, kept, wasted, _ = _milliseconds(result, trial)
    assert kept == wasted > 0


def test_figures_of_a_sweep_without_a_gain_and_without_drafts(result):
    result.champion = result.autoregressive.config_id
    draw_all(result)
    free = ("autoregressive", "prompt_lookup")
    result.trials = [t for t in result.trials if t.configuration.family in free]
    result.pair = result.pair.model_copy(update={"drafts": {}})
    result.profile = result.profile.model_copy(update={"drafts": {}})
    result.timings, result.champion, result.oracles = [], None, []
    draw_all(result)


def test_a_second_draft_is_told_apart(result):
    result.pair = result.pair.model_copy(update={"drafts": {"draft": "a", "other": "b"}})
    costs = result.profile.drafts["draft"]
    result.profile = result.profile.model_copy(update={"drafts": {"draft": costs, "other": costs}})
    fixed = next(t for t in result.trials if t.configuration.family == "fixed")
    other = Configuration(drafter=DraftModelSettings(draft="other", policy=FixedSettings()))
    result.trials.append(fixed.model_copy(update={"configuration": other}))
    figure = frontier(result)
    fronts = {t.name: t for t in scatters(figure) if t.mode == "lines+markers"}
    assert fronts["fixed K · draft"].line.dash == "solid"  # the champion's draft
    assert fronts["fixed K · other"].line.dash == "dot"
    draw_all(result)


def test_every_drafter_has_a_look_of_its_own():
    """Variants share a colour, never a symbol; no drafter falls back on a spare look."""
    policies, drafters = set(POLICIES), set(DRAFTERS)
    rules = ("ucb", "exp3", "thompson")
    bandits = {*rules, *(f"{rule}_time" for rule in rules)}
    assert look.STYLES.keys() >= policies | drafters - {"draft_model", "bandit"} | bandits
    for family in (*look.STYLES, "unheard of"):
        style = look.style(family)
        go.Scatter(marker={"symbol": style.symbol})  # raises for one that plotly does not know
        go.Scatter(marker={"symbol": style.hollow})
    symbols = [style.symbol for style in look.STYLES.values()]
    assert len(set(symbols)) == len(symbols)


def card(depth, w_rej, **changes):
    values = {
        "kind": "specdecpp", "draft": "draft", "depth": depth, "width": 64, "hidden_size": 32,
        "top_k": 10, "w_acc": 1.0, "w_rej": w_rej, "pair": {}, "sampling": Sampling(),
        "metrics": {"train_kl": 0.1 + depth / 100, "eval_kl": 0.2 + w_rej / 10, "auc": 0.8},
    }  # fmt: skip
    return HeadCard(**(values | changes))


@pytest.fixture
def cards():
    return {f"d{d}-w{w:g}": card(d, w) for w in (6.0, 1.0) for d in (0, 3)}


def test_the_table_has_the_fit_of_every_kind_by_its_short_name(cards):
    named = {"bundled:d0": cards["d0-w1"], "/somewhere/heads/t1": card(0, 1.0, kind="t1")}
    table = fits(named).shown
    assert list(table["head"]) == ["d0", "t1"]
    assert list(table["D"]) == ["0", "–"]
    assert list(table["train/KL"]) == ["0.100", "0.100"]
    assert list(table["ECE"]) == ["–", "–"]


def test_of_many_heads_the_first_are_drawn_and_the_others_wait_in_the_legend(cards):
    many = {f"head {i}": cards["d0-w1"] for i in range(8)}
    lines = reliability_diagram(many).data[1:]
    assert [line.visible for line in lines] == [True] * 6 + ["legendonly"] * 2
