"""Heads are the papers' networks, and predict the same after they were saved."""

import json
from typing import get_args

import pytest
import torch
from safetensors.torch import load
from torch.nn import functional as F

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.modules import HeadKind, build_head, join_features
from specdec_core.drafting.heads.storage import load_card, load_head, save_head, weights_of
from tests.specdec_core.drafting.heads.examples import PAIR

HIDDEN, TOP_K = 8, 3


def head_and_card(kind):
    torch.manual_seed(1)
    head = build_head(kind, HIDDEN, TOP_K, depth=2, width=5)
    head.standardise(torch.randn(50, len(head.mean)) * 3 + 1)
    card = HeadCard(
        kind=kind, draft="small", depth=2, width=5, hidden_size=HIDDEN, top_k=TOP_K,
        w_acc=1, w_rej=6, pair=PAIR, sampling=Sampling(),
    )  # fmt: skip
    return head, card


@pytest.fixture
def folder(tmp_path):
    head, card = head_and_card("specdecpp")
    save_head(head, card, tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("kind", get_args(HeadKind))
def test_it_predicts_what_the_module_does_for_one_row_and_for_many(kind, tmp_path):
    head, card = head_and_card(kind)
    head.load_state_dict(load(weights_of(head)))  # within the precision of the stored weights
    written = save_head(head, card, tmp_path / kind)
    loaded = load_head(tmp_path / kind, PAIR["draft"], PAIR["target"])
    assert loaded.card == written
    inputs = {
        "hidden": torch.randn(20, HIDDEN).bfloat16(),  # a draft's own data type
        "top_probs": torch.rand(20, TOP_K),
        "entropy": torch.rand(20),
    }
    expected = head(join_features(kind, **inputs).float()).sigmoid().detach()
    found = loaded.probabilities(**inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    one = loaded.probabilities(**{name: value[:1] for name, value in inputs.items()})
    torch.testing.assert_close(one, expected[:1], atol=1e-6, rtol=1e-5)


def test_heads_are_found_by_name_in_the_workspace_and_by_folder(folder, bare_home):
    folder.rename(bare_home / "moved")
    (bare_home / "heads").mkdir()
    (bare_home / "moved").rename(bare_home / "heads" / "mine")
    assert load_card("mine") == load_card(bare_home / "heads" / "mine")
    with pytest.raises(UserError, match=r"no head yours .*; there are mine"):
        load_card("yours")


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_head_of_another_pair_is_refused(folder, role):
    own = {**PAIR, role: "another"}
    with pytest.raises(UserError, match=f"trained for another {role} model") as error:
        load_head(folder, own["draft"], own["target"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "other weights", "missing", "card"])
def test_broken_files_get_one_line(folder, damage):
    weights, card = folder / "model.safetensors", folder / "head.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "other weights":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        weights.unlink()
    else:
        card.write_text(card.read_text()[:200])
    with pytest.raises(UserError, match=r"model\.safetensors|head\.json") as error:
        load_head(folder, PAIR["draft"], PAIR["target"])
    assert "\n" not in str(error.value)


def test_a_card_that_does_not_fit_its_weights_is_refused(folder):
    card = json.loads((folder / "head.json").read_text())
    (folder / "head.json").write_text(json.dumps({**card, "depth": 3}))
    with pytest.raises(UserError, match="not this head's weights"):
        load_head(folder, PAIR["draft"], PAIR["target"])


def parameters(head):
    return sum(p.numel() for p in head.parameters())


def test_specdecpp_has_blocks_of_its_own_at_every_depth_and_a_linear_layer():
    for depth in range(5):
        assert parameters(build_head("specdecpp", 16, 10, depth)) == depth * (16 * 16 + 16) + 16 + 1


def test_specdecpp_adds_silu_of_a_linear_map_to_its_input():
    torch.manual_seed(0)
    head, e = build_head("specdecpp", 6, 10, depth=2), torch.randn(5, 6)
    h = e
    for block in head.layers:
        h = h + F.silu(h @ block.weight.T + block.bias)
    expected = h @ head.output.weight[0] + head.output.bias
    torch.testing.assert_close(head(e), expected)


def test_decision_models_have_three_and_two_layers_on_their_inputs():
    sizes = {kind: parameters(build_head(kind, 16, 10, width=8)) for kind in ("t1", "t2", "joint")}
    assert sizes["t1"] == (16 * 8 + 8) + (8 * 8 + 8) + (8 + 1)
    assert sizes["t2"] == (11 * 8 + 8) + (8 + 1)
    assert sizes["joint"] == (27 * 8 + 8) + (8 * 8 + 8) + (8 + 1)


def test_each_kind_reads_what_its_paper_says():
    hidden, top, entropy = torch.randn(2, 4), torch.rand(2, 3), torch.rand(2)
    assert torch.equal(join_features("specdecpp", hidden=hidden), hidden)
    assert torch.equal(join_features("t1", hidden=hidden), hidden)
    t2 = join_features("t2", top_probs=top, entropy=entropy)
    assert torch.equal(t2, torch.cat([top, entropy[:, None]], dim=1))
    assert torch.equal(join_features("joint", hidden, top, entropy), torch.cat([hidden, t2], 1))


def test_standardised_features_have_mean_zero_and_deviation_one():
    features = 50 + 3 * torch.randn(1000, 4)
    features[:, 2] = 7.0  # never varies
    head = build_head("specdecpp", 4, 10)
    head.standardise(features)
    seen = (features - head.mean) * head.scale
    torch.testing.assert_close(seen.mean(dim=0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std(dim=0, correction=0)[[0, 1, 3]], torch.ones(3))
    assert torch.isfinite(head(features)).all()
