"""A trained head is shipped in half its size."""

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.models.eagle.loading import load_head, read_card
from specdec_core.models.loading import load_skeleton
from specdec_core.training.eagle.packed import pack_head
from specdec_core.training.eagle.training import EagleTraining, EagleTrainingCard
from specdec_core.training.recorded.finished import load_card
from tests.specdec_core.training.eagle.test_training import SETTINGS


@pytest.fixture(scope="module")
def trained(recorded, tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    settings = SETTINGS.model_copy(update={"epochs": 1, "evaluations": 2})
    training = EagleTraining(recorded.texts, settings)
    training.run(root / "checkpoints")
    training.save(root / "head")
    return root / "head"


def test_a_packed_head_is_the_trained_one_in_eight_bits(trained, tmp_path):
    pack_head(trained, tmp_path / "packed")
    config = load_skeleton(read_card(str(trained)).target).config
    whole, packed = (load_head(str(f), config) for f in (trained, tmp_path / "packed"))
    assert read_card(str(tmp_path / "packed")) == read_card(str(trained))
    assert load_card(tmp_path / "packed", EagleTrainingCard) == load_card(
        trained, EagleTrainingCard
    )
    sizes = [(f / "model.safetensors").stat().st_size for f in (trained, tmp_path / "packed")]
    assert sizes[1] < 0.7 * sizes[0]  # the draft vocabulary's numbers stay as they are
    weights = dict(packed.named_parameters())
    for name, weight in whole.named_parameters():
        if name in weights:
            most = weight.abs().amax(-1, keepdim=True)
            assert ((weights[name] - weight).abs() <= most / 127 + 1e-6).all()
    assert any(not torch.equal(weights[n], w) for n, w in whole.named_parameters() if n in weights)


def test_a_folder_without_a_trained_head_is_refused_in_a_line(tmp_path):
    with pytest.raises(UserError, match=r"training\.json: no such file"):
        pack_head(tmp_path, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
