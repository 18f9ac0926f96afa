"""A table on a narrow console keeps its names and whole numbers."""

import pandas as pd
import pytest
from rich.console import Console

from dashboards.outputs.console import table
from dashboards.sections import Section

ROWS = pd.DataFrame(
    {
        "clients": ["1", "8"],
        "contestant": ["suffix else the small draft model", "autoregressive"],
        "tokens/s": ["1,069", "179"],
        "over our autoregressive": ["1.87× (1.67–2.12)", "1.00×"],
        "over vllm's best": ["1.53× (1.40–1.67)", "1.07× (0.92–1.21)"],
    }
)


def printed(width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table(Section(key="load", shown=ROWS), width))
    return capture.get()


@pytest.mark.parametrize("width", [160, 80, 72, 60, 50])
def test_names_and_numbers_are_whole_at_any_width(width):
    text = printed(width)
    assert "…" not in text
    assert "autoregressive" in text
    assert "1,069" in text
    assert max(map(len, text.splitlines())) <= width


def test_intervals_and_then_columns_are_left_to_the_report():
    assert "(1.67–2.12)" in printed(100)
    assert "1.53×" in printed(72)
    assert "(1.67–2.12)" not in printed(72)
    assert "1.53×" not in printed(50)
    assert "more columns in the report" in printed(50)
