"""Tables as files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specdec_core.base.files import atomic_path


def write_small(frame: pd.DataFrame, path: Path) -> None:
    """Write a table of some rows as Parquet without what describes it to pandas and Arrow, which
    would take most of the file."""
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    with atomic_path(path) as temporary:
        pq.write_table(
            table, temporary, compression="zstd", store_schema=False, write_statistics=False
        )
