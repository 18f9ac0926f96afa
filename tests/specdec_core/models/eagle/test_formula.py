"""Heads compute what the papers define, written here with plain tensors."""

import pytest
import torch
from torch.nn.functional import silu

from tests.specdec_core.models.eagle.heads import DRAFTED, give, outputs, random_head, random_one


def rms(x, weights, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights.weight


def rotated(x, theta):
    """Each pair (i, i + half) of (…, n, heads, width) turned by its angle at positions 0, 1, …"""
    half = x.shape[-1] // 2
    speeds = theta ** -(torch.arange(half) / half)
    angles = (torch.arange(x.shape[-3])[:, None] * speeds)[:, None]
    low, high = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def attended(layer, x, head):
    """Causal attention of grouped queries over (batch, n, …)."""
    settings, attention = head.settings, layer.self_attn
    batch, n, _ = x.shape
    theta = settings.rope_parameters["rope_theta"]

    def split(projection):
        return projection(x).view(batch, n, -1, settings.head_dim)

    queries = rotated(split(attention.q_proj), theta)
    group = settings.num_attention_heads // settings.num_key_value_heads
    keys = rotated(split(attention.k_proj), theta).repeat_interleave(group, dim=2)
    values = split(attention.v_proj).repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", queries, keys) / settings.head_dim**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
    return attention.o_proj(mixed.reshape(batch, n, -1))


def fed(layer, x):
    mlp = layer.mlp
    return mlp.down_proj(silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def eagle_three(head, tokens, g):
    [layer] = head.layers
    eps = head.settings.rms_norm_eps
    normed = rms(g, layer.hidden_norm, eps)
    embedded = rms(head.embed_tokens(tokens), layer.input_layernorm, eps)
    residual = normed if head.settings.norm_before_residual else g
    a = residual + attended(layer, torch.cat([embedded, normed], -1), head)
    return a + fed(layer, rms(a, layer.post_attention_layernorm, eps))


def eagle_one(head, tokens, f):
    [layer] = head.layers
    x = head.fc(torch.cat([head.embed_tokens(tokens), f], -1))
    a = x + attended(layer, x, head)
    return a + fed(layer, rms(a, layer.post_attention_layernorm, head.settings.rms_norm_eps))


def inputs(head):
    torch.manual_seed(3)
    settings = head.settings
    tokens = torch.randint(settings.vocab_size, (2, 7))
    width = len(settings.feature_layers) * settings.target_hidden_size
    return tokens, torch.randn(2, 7, width)


@pytest.mark.parametrize(("before_residual", "before_fc"), [(False, True), (True, False)])
@torch.no_grad()
def test_eagle_three(before_residual, before_fc):
    head = random_head(norm_before_residual=before_residual, norm_before_fc=before_fc)
    give(head)
    eps = head.settings.rms_norm_eps
    tokens, features = inputs(head)
    g = head.fc(rms(features, head.input_norm, eps) if before_fc else features)
    first, logits, wide, second, *_ = outputs(head)
    expected = eagle_three(head, tokens, g)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, eagle_three(head, tokens, first))
    torch.testing.assert_close(logits, head.lm_head(rms(expected, head.norm, eps)))
    tokens = torch.arange(DRAFTED) + head.d2t
    assert torch.equal(tokens, head.t2d.nonzero()[:, 0])
    assert torch.equal(wide[:, tokens], logits[:, -1])
    assert wide[:, ~head.t2d].softmax(-1).isfinite().all()
    assert wide.softmax(-1)[:, ~head.t2d].amax() == 0


@pytest.mark.parametrize(("fc_bias", "qkv_bias"), [(False, True), (True, False)])
@torch.no_grad()
def test_eagle_one(fc_bias, qkv_bias):
    head = random_one(fc_bias, qkv_bias)
    give(head)
    assert (head.fc.bias is not None) == fc_bias
    assert (head.layers[0].self_attn.q_proj.bias is not None) == qkv_bias
    tokens, features = inputs(head)
    first, logits, wide, second, *_ = outputs(head)
    expected = eagle_one(head, tokens, features)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, eagle_one(head, tokens, first))
    torch.testing.assert_close(logits, head.lm_head(expected))
    assert torch.equal(wide, logits[:, -1])
    assert torch.equal(head.proposable, torch.arange(wide.shape[-1]))
