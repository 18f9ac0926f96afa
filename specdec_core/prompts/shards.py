"""Prompts in a folder of Parquet files of limited total size."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path
from specdec_core.prompts.prompt import Prompt

_BATCH = 256  # rows read at a time
_MESSAGE = pa.struct([(name, pa.string()) for name in ("role", "content", "name")])
_SCHEMA = pa.schema(
    [("id", pa.string()), ("prompt", pa.string()), ("messages", pa.list_(_MESSAGE))]
)


def write_shard(folder: Path, prompts: Sequence[Prompt]) -> Path:
    """Write prompts into a new file of `folder`, whole or not at all; chats keep their messages.
    Only the user can read folder and file. Names sort by the time they were written. Raises
    :class:`NoRoom`."""
    rows = [
        {
            "id": prompt.id,
            "prompt": None if prompt.messages else prompt.text,
            "messages": [asdict(message) for message in prompt.messages] or None,
        }
        for prompt in prompts
    ]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = folder / f"prompts-{moment}-{time.time_ns() % 10**9:09}-{secrets.token_hex(4)}.parquet"
    with atomic_path(path, mode=0o600) as temporary:
        parquet.write_table(pa.Table.from_pylist(rows, _SCHEMA), temporary, compression="zstd")
    return path


def keep_within(folder: Path, limit: int) -> list[Path]:
    """Delete the oldest files until those in `folder` have at most `limit` bytes; returns which.
    Several processes may write and delete in the folder at the same time."""
    left, deleted = 0, []
    for file in sorted(folder.glob("prompts-*.parquet"), reverse=True):
        try:
            left += file.stat().st_size
        except FileNotFoundError:
            continue
        if left > limit:
            file.unlink(missing_ok=True)
            deleted.append(file)
    return deleted


def shard_records(path: Path, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file without empty values, each after its place in the set of that
    `name`, or else in the file. Raises :class:`UserError`."""
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_BATCH):
            for record in batch.to_pylist():
                number += 1
                given = {key: value for key, value in record.items() if value is not None}
                yield f"{name or path}, row {number}", given
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as Parquet: {reason}") from None
