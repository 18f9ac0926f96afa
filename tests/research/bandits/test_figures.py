"""Figures of regret show what the rounds say, with the paper's bound above the curve."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from dashboards.outputs.console import table as console_table
from dashboards.outputs.html import page
from dashboards.outputs.markdown import document
from dashboards.sections import ReportOrigin
from research.bandits.comparison import ArmComparison, ArmsPlan, race, settings_of
from research.bandits.figures import arm_shares, bound_of, regret_curves, regret_table
from research.bandits.regret import exp3_bound, hardness
from research.bandits.report import headline, report
from specdec_core.config import parse
from specdec_core.models.pair import Pair
from tests.dashboards.conftest import NEW_TOKENS, REQUESTS
from tests.research.addresses import fetched

PLAN = parse(
    ArmsPlan,
    {"arms": [1, 5], "bandits": [{}, {"rule": "exp3"}, {"reward": "time"}, {"rule": "thompson"}]},
    "plan",
)


@pytest.fixture(scope="module")
def comparison(tiny_pair: Pair) -> ArmComparison:
    return race(tiny_pair, PLAN, [request.tokens for request in REQUESTS] * 3, NEW_TOKENS)


def line(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def test_curves_end_where_the_rounds_do(comparison: ArmComparison) -> None:
    figure = regret_curves(comparison)
    best = comparison.best()
    for bandit in comparison.of("bandit")[:2]:
        trace = line(figure, bandit.name)
        assert trace.x[-1] == len(bandit.rounds)
        assert trace.y[-1] == pytest.approx(len(bandit.rounds) - len(best.rounds))
    names = [trace.name for trace in figure.data]
    assert best.name not in names  # it is the line at 0
    assert "UCB of 2 arms, by time" not in names  # rewarded in something else
    bandits = comparison.of("bandit")
    counting = [b for b in bandits if settings_of(b.configuration).reward == "tokens"]
    least = min(counting, key=lambda b: len(b.rounds))
    assert figure.layout.title.text.startswith(f"{least.name} loses the least")


def test_seconds_are_drawn_for_all_bandits(comparison: ArmComparison) -> None:
    figure = regret_curves(comparison, timed=True)
    for bandit in comparison.of("bandit"):
        spent = [
            sum(c.spent[-1] for c in entrant.courses(timed=True))
            for entrant in (bandit, comparison.best(timed=True))
        ]
        assert line(figure, bandit.name).y[-1] == pytest.approx(spent[0] - spent[1])
    assert not [trace for trace in figure.data if "×" in trace.name]


def test_the_bound_stays_above_the_curve_and_touches_it(comparison: ArmComparison) -> None:
    figure = regret_curves(comparison)
    for bandit in comparison.of("bandit")[:2]:
        bound = bound_of(comparison, bandit)
        loss = comparison.regret(bandit)
        assert bound.constant > 0
        late = bound.curve > bound.curve[-1] / 4
        gap = bound.constant * bound.curve[late] - loss.regret[late]
        assert gap.min() == pytest.approx(0, abs=1e-9)
        drawn = next(t for t in figure.data if t.name.endswith(f"({bandit.name})"))
        assert drawn.name.startswith(f"{bound.constant:.2g} × ")
        assert drawn.y[-1] == pytest.approx(bound.constant * bound.curve[-1])
    ucb, exp3 = (bound_of(comparison, b) for b in comparison.of("bandit")[:2])
    written = sum(comparison.entrants[0].tokens)
    assert ucb.curve[-1] == pytest.approx(hardness(comparison.means) * 25 * math.log(written))
    rounds = np.array([len(comparison.best().rounds)])
    assert exp3.curve[-1] == pytest.approx(exp3_bound(2, 5, rounds)[0])


def test_shares_of_all_arms_fill_every_panel(comparison: ArmComparison) -> None:
    figure = arm_shares(comparison, windows=6)
    bandits, arms = comparison.of("bandit"), comparison.of("arm")
    assert len(figure.data) == len(bandits) * len(arms)
    for number, bandit in enumerate(bandits):
        traces = figure.data[number * len(arms) : (number + 1) * len(arms)]
        assert [trace.name for trace in traces] == [arm.name for arm in arms]
        assert np.sum([trace.y for trace in traces], axis=0) == pytest.approx(np.ones(6))
        chosen = np.array([r.arm for r in bandit.rounds if r.arm is not None])
        assert traces[0].y[0] == np.mean(np.array_split(chosen, 6)[0] == 0)


def test_the_table_belongs_to_the_figure(comparison: ArmComparison) -> None:
    table = regret_table(comparison).set_index("bandit")
    ucb = comparison.of("bandit")[0]
    assert table.loc["UCB of 2 arms", "regret (rounds)"] == comparison.regret(ucb).total
    assert table.loc["UCB of 2 arms", "bound"] == "H L² log E[len]"
    assert table.loc["UCB of 2 arms, by time", "bound"] == "–"
    assert table.loc["Thompson of 2 arms", "bound"] == "–"  # no theorem of the paper's


def test_the_page_needs_no_network_and_says_who_won(comparison: ArmComparison) -> None:
    shown = report(comparison, ReportOrigin(name="name", pair="pair", notes=["a note"]))
    html, text = page(shown), document(shown)
    assert fetched(html) == []
    assert headline(comparison.table()) in html.replace("&#39;", "'")
    for key in ("regret", "regret_seconds", "arms"):
        assert f'data-plot="{key}"' in html
    tables = [section for section in shown.sections if section.shown is not None]
    assert [section.key for section in tables] == ["table", "shares", "regret"]
    matches = re.findall(r"\n\| (\*\*)?UCB of 2 arms", text)
    assert len(matches) == 2 * len(tables)  # two rules in each
    assert "- a note" in text
    assert console_table(tables[0]).row_count == len(comparison.entrants)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.1, "tied with"), (1.05, 1.2, "faster than"), (0.7, 0.9, "slower than")],
)
def test_the_headline_knows_a_tie(
    comparison: ArmComparison, low: float, high: float, verdict: str
) -> None:
    table = comparison.table().assign(low=low, high=high)
    assert verdict in headline(table)
