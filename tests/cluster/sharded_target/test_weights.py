"""A split target's weights are checked as a whole model's are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cluster.placement import Placement
from cluster.sharded_target.sharded_pair import sharded_pair
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec


@pytest.mark.parametrize("split", ["layers", pytest.param("heads", marks=pytest.mark.long)])
def test_weights_that_do_not_fit_are_refused_as_for_a_whole_model(
    ray_running: None, tiny_spec: PairSpec, tmp_path: Path, split: str
) -> None:
    """Tensors of a layer of one rank are missing, others are of a layer of no rank."""
    folder = Path(shutil.copytree(tiny_spec.target, tmp_path / "target"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = tiny_spec.model_copy(update={"target": str(folder), "drafts": {}})
    target = {"devices": 2, "split": split}
    placement = Placement.model_validate({"draft": {"devices": 0}, "target": target})
    pattern = r"^\S+: its weights do not fit .*unknown tensors: model\.layers\.7\.mlp\.up_proj"
    with pytest.raises(UserError, match=pattern), sharded_pair(spec, placement):
        pass
