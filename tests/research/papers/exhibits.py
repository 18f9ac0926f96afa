"""What every exhibit of the page has, whatever it is computed from."""

from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from dashboards.outputs.markdown import part
from research.papers.sections import Exhibit


def drawn(sections: Iterable[Exhibit], inputs: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The tables of `sections` by key; each is shown with the paper's finding, a verdict and,
    where it has one, its figure."""
    tables = {}
    for section in sections:
        table = section.measure(*(inputs[name] for name in section.needs))
        assert len(table), section.key
        shown = section.section(table)
        text = part(shown)
        assert shown.shown is not None
        assert len(shown.shown)
        assert "In the paper: " in text
        assert "Here: " in text
        assert shown.terms["Verdict"]
        if shown.svg is not None:
            ElementTree.fromstring(shown.svg)
            assert "nan" not in shown.svg
            assert f"({section.key}.svg)" in text
        tables[section.key] = table
    return tables
