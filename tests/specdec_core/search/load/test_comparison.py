"""Who is best at a load, by what its requests gained and cost."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from specdec_core.search.load.comparison import LoadComparison
from specdec_core.search.load.measures import COLUMNS, measure
from specdec_core.search.load.workload import Load, Slo

FOUR = Load(clients=4, requests=24)
TOKENS = 10


def runs(seconds: float, noise: float = 0.0, turns: int = 3, requests: int = 24) -> list:
    """Four clients that always wait, whose requests take so long, give or take."""
    rng = np.random.default_rng(int(1000 * seconds))
    each = []
    for _ in range(turns):
        sent, rows = [0.0] * 4, []
        for index in range(requests):
            client = int(np.argmin(sent))
            last = sent[client] + seconds * rng.normal(1, noise)
            rows.append((index, sent[client], sent[client] + 0.2 * seconds, last, 5, TOKENS, None))
            sent[client] = last
        each.append(pd.DataFrame(rows, columns=list(COLUMNS)))
    return each


def test_tokens_a_second_of_clients_that_always_wait_are_those_of_the_run() -> None:
    comparison = LoadComparison({"a": runs(2.0), "b": runs(1.0)}, FOUR, "tokens_per_second")
    ratio = comparison.ratio("b", "a")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    whole = [measure(runs(seconds)[0]).tokens_per_second for seconds in (1.0, 2.0)]
    assert ratio.value == pytest.approx(whole[0] / whole[1])
    assert comparison.ratio("a", "a").value == 1


def test_the_least_expected_cost_decides_among_those_in_question() -> None:
    noisy = {"slow": runs(2.0, 0.1), "fast": runs(1.0, 0.1), "same": runs(1.01, 0.1)}
    comparison = LoadComparison(noisy, FOUR, "tokens_per_second")
    assert set(comparison.in_question(noisy)) == {"fast", "same"}
    chosen = comparison.choose(noisy)
    assert chosen in ("fast", "same")
    cost = comparison.cost(chosen, noisy)
    assert 0 <= cost.low <= cost.expected <= cost.high < 0.1
    assert comparison.cost("slow", noisy).expected == pytest.approx(0.5, abs=0.05)
    assert comparison.decision() == (chosen, comparison.cost(chosen, noisy))


def test_what_is_kept_has_to_be_in_question_and_to_cost_little() -> None:
    noisy = {"slow": runs(2.0, 0.1), "fast": runs(1.0, 0.1), "same": runs(1.01, 0.1)}
    comparison = LoadComparison(noisy, FOUR, "tokens_per_second")
    assert comparison.decision("slow", tolerance=1)[0] != "slow"
    (best, _), others = comparison.decision(), {"same", "fast"}
    (other,) = others - {best}
    cost = comparison.cost(other, noisy)
    assert comparison.decision(other, tolerance=0.5) == (other, cost)
    assert comparison.decision(other, tolerance=0.5, most=cost.high)[0] == other
    assert comparison.decision(other, tolerance=0.5, most=0.9 * cost.high)[0] == best
    assert comparison.decision(other, tolerance=0)[0] == best


def test_intervals_of_several_looks_hold_together() -> None:
    noisy = {"a": runs(1.0, 0.3), "b": runs(1.01, 0.3)}
    once, often = (
        LoadComparison(noisy, FOUR, "tokens_per_second", looks=looks).ratio("b", "a")
        for looks in (1, 5)
    )
    assert often.value == once.value
    assert often.low < once.low < once.high < often.high


def test_whoever_left_is_compared_over_the_turns_that_it_had() -> None:
    """The machine is three times slower from the third turn on."""
    measured = {"left": runs(1.1, turns=2), "stayed": [*runs(1.0, turns=2), *runs(3.0, turns=3)],
                "too": [*runs(1.0, turns=2), *runs(2.0, turns=3)]}  # fmt: skip
    comparison = LoadComparison(measured, FOUR, "tokens_per_second")
    ratio = comparison.ratio("stayed", "left")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    assert comparison.cost("stayed", ["stayed", "left"]).high == 0
    # Those who had all turns are compared over all of them.
    assert comparison.racing == ["stayed", "too"]
    assert comparison.ratio("too", "stayed").value == pytest.approx(1.5)
    assert comparison.cost("stayed", comparison.racing).expected > 0.2


def test_goodput_counts_requests_within_the_objective() -> None:
    measured = {"late": runs(2.0), "in time": runs(1.0)}
    comparison = LoadComparison(measured, FOUR, "goodput", Slo(latency=1.5))
    assert comparison.ratio("in time", "late").value == float("inf")
    assert comparison.ratio("late", "in time").high == 0
    assert comparison.choose(measured) == "in time"
    nobody = LoadComparison(measured, FOUR, "goodput", Slo(latency=0.5))
    assert nobody.ratio("in time", "late").tied
    assert nobody.cost("late", measured).high == 0


def test_an_open_loop_has_a_share_of_its_requests_within_the_objective() -> None:
    load = Load(rate=3.0, requests=24)
    halves = [pd.concat([runs(1.0)[0][:12], runs(2.0)[0][12:]])]
    comparison = LoadComparison({"half": halves, "all": runs(1.0, turns=1)}, load, "goodput",
                            Slo(latency=1.5))  # fmt: skip
    assert comparison.ratio("all", "half").value == pytest.approx(2)
