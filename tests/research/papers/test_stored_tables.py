"""Small tables in one file."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from research.papers.stored_tables import write_together


def test_tables_in_one_file_are_told_apart(tmp_path: Path) -> None:
    frames = {
        "rates": pd.DataFrame({"prompts": ["chat", "code"], "rate": [0.25, 1.5], "n": [3, 4]}),
        "shapes": pd.DataFrame({"rate": ["2×1", "4×2"], "sure": [True, False]}),
    }
    write_together(frames, tmp_path / "all.parquet")
    read = pd.read_parquet(tmp_path / "all.parquet")
    rates, shapes = (read[read["table"] == name].dropna(axis=1, how="all") for name in frames)
    assert rates["prompts"].tolist() == ["chat", "code"]
    assert rates["rate"].astype(float).tolist() == [0.25, 1.5]
    assert rates["n"].tolist() == [3, 4]
    assert shapes["rate"].tolist() == ["2×1", "4×2"]
    assert shapes["sure"].tolist() == [True, False]
    assert set(shapes.columns) == {"table", "rate", "sure"}
