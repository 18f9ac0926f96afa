"""Small random heads and their target's configuration."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from specdec_core.models.eagle import AnyHead, EagleHead, EagleOneHead, EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard

LAYERS, WIDTH, VOCABULARY, DRAFTED = 9, 32, 60, 24
CARD = EagleCard(
    target="some/target",
    target_architectures=("LlamaForCausalLM",),
    target_fingerprint="0123456789abcdef",
    speculative_tokens=4,
    training={"epochs": 2},
)


def target_config(**changes: Any) -> LlamaConfig:
    values = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    return LlamaConfig(**{**values, **changes})


def random_head(drafted: int = DRAFTED, **changes: Any) -> EagleHead:
    """With norms that are not all one, and a draft vocabulary with gaps."""
    torch.manual_seed(1)
    head = EagleHead(EagleSettings.for_target(target_config(), drafted, **changes))
    randomise(head)
    head.propose_only(torch.randperm(VOCABULARY)[:drafted].sort().values)
    return head.eval()


def random_one(fc_bias: bool = True, qkv_bias: bool = False) -> EagleOneHead:
    config = target_config(head_dim=WIDTH // 4)
    settings = EagleSettings.for_target(config, VOCABULARY, feature_layers=(LAYERS,))
    head = EagleOneHead(settings, fc_bias, qkv_bias)
    torch.manual_seed(1)
    randomise(head)
    return head.eval()


def randomise(head: nn.Module) -> None:
    with torch.no_grad():
        for name, weights in head.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, 0.2)


def give(head: AnyHead) -> None:
    """What the target gives a head: its embedding, and its output layer to one without."""
    torch.manual_seed(2)
    dtype = head.fc.weight.dtype
    width = head.settings.hidden_size
    head.embed_tokens = nn.Embedding(VOCABULARY, width).to(dtype)
    if isinstance(head, EagleOneHead):
        head.lm_head = nn.Linear(width, VOCABULARY, bias=False).to(dtype)


@torch.no_grad()
def outputs(head: AnyHead) -> list[torch.Tensor]:
    """Logits and states of two passes, the second from the states of the first."""
    if head.embed_tokens is None:
        give(head)
    torch.manual_seed(3)
    settings = head.settings
    tokens = torch.randint(VOCABULARY, (2, 7))
    features = torch.randn(2, 7, len(settings.feature_layers) * settings.target_hidden_size)
    states = head.fused(features.to(head.fc.weight.dtype))
    positions = torch.arange(7).expand(2, 7)
    mask = torch.full((7, 7), float("-inf")).triu(1).to(states.dtype).expand(2, 1, 7, 7)
    found = []
    for _ in range(2):
        states = head(tokens, states, positions, mask)
        logits = head.logits(states)
        found += [states, logits, head.spread(logits[:, -1])]
    return found
