"""Figures of regret show what the rounds say, with the paper's bound above the curve."""

import math

import numpy as np
import pytest

from research.bandits.comparison import ArmsPlan, race
from research.bandits.figures import bound_of, regret_lines
from research.bandits.regret import exp3_bound, hardness
from research.bandits.report import headline
from specdec_core.config import parse
from tests.dashboards.conftest import NEW_TOKENS, REQUESTS

PLAN = parse(
    ArmsPlan,
    {"arms": [1, 5], "bandits": [{}, {"rule": "exp3"}, {"reward": "time"}, {"rule": "thompson"}]},
    "plan",
)


@pytest.fixture(scope="module")
def comparison(tiny_pair):
    return race(tiny_pair, PLAN, [request.tokens for request in REQUESTS], NEW_TOKENS)


def test_curves_end_where_the_rounds_do(comparison):
    lines = {line.name: line for line in regret_lines(comparison)}
    best = comparison.best()
    for bandit in comparison.of("bandit")[:2]:
        line = lines[bandit.name]
        assert line.x[-1] == len(bandit.rounds)
        assert line.y[-1] == pytest.approx(len(bandit.rounds) - len(best.rounds))
    assert "UCB of 2 arms, by time" not in lines  # rewarded in something else
    seconds = regret_lines(comparison, timed=True)
    assert [line.name for line in seconds] == [b.name for b in comparison.of("bandit")]


def test_the_bound_stays_above_the_curve_and_touches_it(comparison):
    lines = regret_lines(comparison)
    for bandit in comparison.of("bandit")[:2]:
        bound = bound_of(comparison, bandit)
        loss = comparison.regret(bandit)
        assert bound.constant > 0
        late = bound.curve > bound.curve[-1] / 4
        gap = bound.constant * bound.curve[late] - loss.regret[late]
        assert gap.min() == pytest.approx(0, abs=1e-9)
        drawn = next(line for line in lines if line.name.endswith(f"({bandit.name})"))
        assert drawn.name.startswith(f"{bound.constant:.2g} × ")
        assert drawn.y[-1] == pytest.approx(bound.constant * bound.curve[-1])
    ucb, exp3 = (bound_of(comparison, b) for b in comparison.of("bandit")[:2])
    written = sum(comparison.entrants[0].tokens)
    assert ucb.curve[-1] == pytest.approx(hardness(comparison.means) * 25 * math.log(written))
    rounds = np.array([len(comparison.best().rounds)])
    assert exp3.curve[-1] == pytest.approx(exp3_bound(2, 5, rounds)[0])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.1, "tied with"), (1.05, 1.2, "faster than"), (0.7, 0.9, "slower than")],
)
def test_the_headline_knows_a_tie(comparison, low, high, verdict):
    table = comparison.table().assign(low=low, high=high)
    assert verdict in headline(table)
