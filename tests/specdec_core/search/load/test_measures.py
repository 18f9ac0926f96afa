"""Requests have the measures of the field; failed requests have none."""

import pandas as pd
import pytest

from specdec_core.search.load.measures import COLUMNS, measure, measured
from specdec_core.search.load.workload import Slo


def records(*rows):
    return pd.DataFrame([(n, *row) for n, row in enumerate(rows)], columns=list(COLUMNS))


THREE = records(
    (10.0, 10.2, 11.2, 30, 11, None),
    (10.5, 11.5, 11.5, 30, 1, None),
    (11.0, None, None, 30, 0, "refused"),
)


def test_measures_of_each_request():
    table = measured(THREE)
    assert table["ttft"][:2].tolist() == pytest.approx([0.2, 1.0])
    assert table["tpot"][0] == pytest.approx(0.1)
    assert table["latency"][:2].tolist() == pytest.approx([1.2, 1.0])
    assert table["tokens_per_second"][0] == pytest.approx(11 / 1.2)
    assert table["tpot"][1:].isna().all()  # a single token, and none
    assert table["latency"].isna().tolist() == [False, False, True]


def test_goodput_counts_requests_within_the_objective():
    def share(**limits):
        return measure(THREE, Slo(**limits)).good_share

    assert share(ttft=0.5) == pytest.approx(1 / 3)
    assert share(ttft=2) == pytest.approx(2 / 3)  # the failed one never counts
    assert share(tpot=0.05) == pytest.approx(1 / 3)  # a single token has no TPOT to miss
    assert share(ttft=2, latency=1.1) == pytest.approx(1 / 3)
    assert measure(THREE, Slo(ttft=0.5)).goodput == pytest.approx(1 / 1.5)


def test_measures_of_all_together():
    together = measure(THREE)
    assert (together.requests, together.failed) == (3, 1)
    assert together.seconds == pytest.approx(1.5)
    assert together.requests_per_second == pytest.approx(2 / 1.5)
    assert together.tokens_per_second == pytest.approx(12 / 1.5)
    assert together.ttft[50] == pytest.approx(0.6)
    assert together.value("tpot", 50) == pytest.approx(0.1)


def test_all_failed_has_no_percentiles_and_nothing_raises():
    failed = measure(records((1.0, None, None, 3, 0, "refused")), Slo(ttft=1))
    assert (failed.failed, failed.goodput, failed.ttft) == (1, 0, {})
    with pytest.raises(ValueError, match="no requests"):
        measure(records())
