"""What comes with a registered champion is in the workspace whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dashboards.tracking.registry import _copy


def test_a_copy_that_ends_half_way_leaves_nothing_to_be_taken_for_whole(tmp_path: Path) -> None:
    source, head = tmp_path / "artifact", tmp_path / "heads" / "small"
    source.mkdir()
    (source / "head.json").write_text("{}")
    (source / "model.safetensors").symlink_to("lost")
    with pytest.raises(shutil.Error):
        _copy(source, head)
    assert not head.exists()
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").write_bytes(b"weights")
    _copy(source, head)
    assert sorted(file.name for file in head.iterdir()) == ["head.json", "model.safetensors"]
    assert [folder.name for folder in head.parent.iterdir()] == ["small"]
