"""Heads are the networks that the papers describe."""

import torch
from torch.nn import functional as F

from specdec_core.drafting.heads.modules import build_head, join_features


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
