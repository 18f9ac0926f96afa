"""Post-use's and improved MCSD's sections say what was measured, in tables and figures."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from dashboards.outputs.markdown import part
from dashboards.reports.component_times import component_times
from dashboards.reports.decision_values import decision_values
from dashboards.reports.draft_reuse import best_lengths, recycled
from dashboards.sections import Section
from specdec_core.studies.component_times import CONTROLLER, M_D, M_T, REST, ComponentTimes
from specdec_core.studies.decision_values import DecisionValues
from specdec_core.studies.draft_reuse import (
    DRAFT_CALL,
    DRAFTED,
    REJECTED,
    TARGET_CALL,
    BestLengths,
)
from specdec_core.tokens.statistics import Counts


def lengths() -> Section:
    rounds = pd.DataFrame({"request": "a", "round": [1, 2, 3, 4], "length": [0, 3, 5, 28]})
    frame = pd.DataFrame({"length": [3], "speedup": [2.0]})
    return best_lengths([BestLengths("small", 3, frame, rounds)])


def reused() -> Section:
    rows = [
        {"call": call, "tokens": tokens, "of": of, "calls": 10, "share": share / tokens}
        for call in (DRAFT_CALL, TARGET_CALL)
        for tokens in (1, 2)
        for of, share in ((DRAFTED, 0.6), (REJECTED, 0.4))
    ]
    return recycled({"small": pd.DataFrame(rows)})


def values() -> Section:
    judged = DecisionValues("t1", "small", 99, np.array([0.1, 0.9, 0.9]), np.array([0.0, 0.0, 1.0]))
    return decision_values([judged])


def test_lengths_are_told_with_the_share_of_rounds_on_either_side() -> None:
    section = lengths()
    [row] = section.shown.to_dict("records")
    assert (row["rounds"], row["best fixed"]) == ("4", "3")
    assert (row["shorter than fixed"], row["longer"]) == ("25%", "50%")
    assert list(section.figure.data[0].y) == [0, 3, 5, 28]
    assert sum(section.figure.data[1].y) == 1
    assert "20 or more" in section.svg


def test_shares_of_phrases_are_by_call_length_and_what_they_are_of() -> None:
    section = reused()
    assert list(section.shown["after a"]) == [DRAFT_CALL] * 2 + [TARGET_CALL] * 2
    assert list(section.shown["2 tokens"]) == ["30%", "20%"] * 2
    assert [list(line.y) for line in section.figure.data[:2]] == [[0.6, 0.3], [0.4, 0.2]]


def test_components_stand_beside_the_papers() -> None:
    table = pd.DataFrame(
        {
            "component": [M_D, M_T, CONTROLLER, REST],
            "calls": [4, 2, 6, 2],
            "seconds": [0.004, 0.014, 0.0006, 0.001],
            "each": [1.0, 7.0, 0.1, 0.5],
            "a_round": [2.0, 1.0, 3.0, 1.0],
            "share": [0.2, 0.7, 0.03, 0.07],
        }
    )
    counts = Counts(
        requests=1, n=20, n_draft=4, n_target=3, n_discarded=1, n_drafted=9, n_accepted=8,
        n_target_tokens=3,
    )  # fmt: skip
    section = component_times(ComponentTimes(table, counts, drafted=8, recycled=4, suffixes=5))
    assert list(section.shown["paper, each"]) == ["21 ms", "152 ms", "< 0.1 ms", "–"]
    assert "Of 8 drafted tokens, 4 (50%)" in section.lines[0]
    assert "of 20 tokens of the output, 5 (25%)" in section.lines[0]


def test_values_are_told_by_outcome() -> None:
    section = values()
    [row] = section.shown.to_dict("records")
    assert row["AUC"] == "0.750"
    assert (row["accepted, but stopped at"], row["rejected, but passed"]) == ("0%", "50%")
    assert row["overlap"] == "50%"
    assert section.svg.count("0.8–1.0") == 2


@pytest.mark.parametrize("section", [lengths(), reused(), values()], ids=lambda s: s.key)
def test_figures_are_drawn_for_every_output(section: Section) -> None:
    assert section.figure.layout.title.text
    ElementTree.fromstring(section.svg)
    assert "|" in part(section)
