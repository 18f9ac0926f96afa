"""Post-use's and improved MCSD's sections say what was measured, in tables and figures."""

from __future__ import annotations

from xml.etree import ElementTree

import pandas as pd
import pytest

from dashboards.outputs.markdown import part
from dashboards.sections import Section
from research.papers.component_times import CONTROLLER, M_D, M_T, REST
from research.papers.draft_reuse import DRAFT_CALL, DRAFTED, REJECTED, TARGET_CALL
from research.papers.sections import SECTIONS

ROUNDS = pd.DataFrame(
    {
        "prompts": "sums", "draft": "small", "fixed": 3,
        "request": "a", "round": [1, 2, 3, 4], "length": [0, 3, 5, 28],
    }
)  # fmt: skip
PHRASES = pd.DataFrame(
    {
        "prompts": "sums", "draft": "small", "call": call, "tokens": tokens, "of": of,
        "calls": 10, "share": share / tokens,
    }
    for call in (DRAFT_CALL, TARGET_CALL)
    for tokens in (1, 2, 3)
    for of, share in ((DRAFTED, 0.6), (REJECTED, 0.3))
)  # fmt: skip
CONFIDENCES = pd.DataFrame(
    {
        "prompts": "sums", "draft": "small", "low": [0.0, 0.5, 0.9], "high": [0.1, 0.6, 1.0],
        "product": [0.05, 0.55, 0.95], "acceptance": [0.1, 0.5, 0.9], "count": 7,
    }
)  # fmt: skip
COMPONENTS = pd.DataFrame(
    {
        "component": [M_D, M_T, CONTROLLER, REST],
        "each": [1.0, 7.0, 0.1, 0.5],
        "a_round": [2.0, 1.0, 3.0, 1.0],
        "share": [0.2, 0.7, 0.03, 0.07],
        "tokens": 20, "drafted": 8, "recycled": 4, "suffixes": 5,
    }
)  # fmt: skip
VALUES = pd.DataFrame(
    {
        "kind": "t1", "draft": "small", "trained": 99,
        "value": [0.1, 0.9, 0.9], "accepted": [0.0, 0.0, 1.0],
    }
)  # fmt: skip
TABLES = {
    "post-use-f2a": ROUNDS,
    "post-use-f2b": PHRASES,
    "post-use-f2c": CONFIDENCES,
    "post-use-9": COMPONENTS,
    "mcsd-f7": VALUES,
}
OURS = {
    "post-use-f2a": "75% of the rounds want another length",
    "post-use-f2b": "after 20%–20% of the target calls",
    "post-use-f2c": "correlation 1.00",
    "post-use-9": "M_d 1.0 ms, M_t 7.0 ms",
    "mcsd-f7": "50% overlap, AUC 0.75",
}


def shown(key: str) -> Section:
    [section] = [each for each in SECTIONS if each.key == key]
    return section.section(TABLES[key])


@pytest.mark.parametrize("key", TABLES)
def test_each_is_on_the_page_with_the_papers_finding_and_ours(key: str) -> None:
    [section] = [each for each in SECTIONS if each.key == key]
    text = part(shown(key))
    assert "In the paper: " in text
    assert "Here: " in text
    assert section.ours(TABLES[key]) == OURS[key]
    if (svg := shown(key).svg) is not None:
        ElementTree.fromstring(svg)
        assert f"({key}.svg)" in text
