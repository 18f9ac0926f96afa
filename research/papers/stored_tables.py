"""Tables as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specdec_core.base.files import atomic_path

_NUMBERS = dict.fromkeys(("floating", "integer", "mixed-integer-float"), pa.float32())
_KINDS = {"boolean": pa.bool_(), **_NUMBERS}


def write_together(frames: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Write several small tables as one Parquet file: their rows below each other, the columns of
    all, and a column `table` with the name that each row is of. A file for each would take more for
    what describes it than for its rows. Numbers are in single precision; a column that has numbers
    in one table and text in another is text."""
    named = [frame.assign(table=name) for name, frame in frames.items()]
    whole = pd.concat(named, ignore_index=True)
    table = pa.table({str(name): _column(whole[name]) for name in whole.columns})
    numbers = [field.name for field in table.schema if field.type == pa.float32()]
    with atomic_path(path) as temporary:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=19,
            use_dictionary=[name for name in table.column_names if name not in numbers],
            column_encoding=dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
            store_schema=False,
            write_statistics=False,
        )


def _column(values: pd.Series[Any]) -> pa.Array:
    kind = _KINDS.get(pd.api.types.infer_dtype(values, skipna=True), pa.string())
    if kind == pa.string():
        values = values.map(str, na_action="ignore")
    return pa.array(values, kind, from_pandas=True)
