"""The unrolled head is the head that drafts: step by step, with a cache, from each start."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.training.eagle.unrolled import unroll
from specdec_core.training.recorded.features import TextBatch

WIDTH, VOCABULARY, STEPS = 16, 40, 4
SETTINGS = EagleSettings(
    hidden_size=WIDTH,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    vocab_size=VOCABULARY,
    draft_vocab_size=20,
    target_hidden_size=WIDTH,
    feature_layers=(0, 1),
)


def made_head(settings=SETTINGS):
    torch.manual_seed(0)
    head = EagleHead(settings).eval()
    head.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return head


def made_batch(lengths):
    """Texts with these numbers of tokens of prompt and answer, and random features."""
    generator = torch.Generator().manual_seed(1)
    longest, answer = max(map(sum, lengths)), max(a for _, a in lengths)
    tokens = torch.randint(VOCABULARY, (len(lengths), longest), generator=generator)
    return TextBatch(
        tokens=tokens,
        features=torch.randn(len(lengths), longest - 1, 2 * WIDTH, generator=generator),
        prompts=torch.tensor([p for p, _ in lengths]),
        lengths=torch.tensor([a - 1 for _, a in lengths]),
        last=torch.randn(len(lengths), answer - 1, WIDTH, generator=generator),
        normaliser=torch.zeros(len(lengths), answer - 1),
        best=torch.zeros(len(lengths), answer - 1, dtype=torch.long),
        temperatures=torch.zeros(len(lengths)),
    )


@torch.no_grad()
def drafted(head, batch, text, start, steps):
    """The states of a chain as a drafter makes them: true features up to its first token, then the
    head's own states."""
    first = int(batch.prompts[text]) + start  # the token that the chain starts at
    cache = DynamicCache(config=head.config)

    def read(tokens, states, places):
        n, past = len(tokens), cache.get_seq_length()
        mask = torch.ones(n, past + n, dtype=torch.bool).tril(past)[None, None]
        return head(tokens[None], states[None], places[None], mask, cache)[0]

    row, fused = batch.tokens[text], head.fused(batch.features[text])
    states = [read(row[1 : first + 1], fused[:first], torch.arange(1, first + 1))[-1:]]
    for place in range(first + 1, first + steps):
        at = torch.tensor([place])
        states.append(read(row[at], states[-1], at))
    return states


def found(steps, text, start):
    return [
        step.states[(step.texts == text) & (step.starts == start)]
        for step in steps
        if ((step.texts == text) & (step.starts == start)).any()
    ]


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True, "norm_before_fc": True}])
def test_every_step_from_every_start_is_what_drafting_computes(changes):
    head = made_head(SETTINGS.model_copy(update=changes))
    lengths = [(3, 9), (6, 4), (1, 2)]
    batch = made_batch(lengths)
    with torch.no_grad():
        steps = unroll(head, batch, STEPS)
    for text, (_, answer) in enumerate(lengths):
        for start in range(answer - 1):
            states = found(steps, text, start)
            # A chain continues while the token after the one that it reads is known.
            assert len(states) == min(STEPS, answer - 1 - start)
            expected = drafted(head, batch, text, start, len(states))
            torch.testing.assert_close(torch.cat(states), torch.cat(expected))


def test_a_share_of_the_chains_goes_on_unchanged():
    head, batch = made_head(), made_batch([(3, 33), (5, 29)])
    with torch.no_grad():
        whole = unroll(head, batch, STEPS)
        torch.manual_seed(0)
        draws = [unroll(head, batch, STEPS, 0.5) for _ in range(40)]
    some = draws[0]
    for step, each in enumerate(whole):
        count = sum(len(draw[step].states) for draw in draws if step < len(draw))
        assert count / len(draws) == pytest.approx(len(each.states) * 0.5**step, rel=0.15)
    for number, step in enumerate(some):
        for text, start, state in zip(step.texts, step.starts, step.states, strict=True):
            [expected] = found(whole, int(text), int(start))[number]
            torch.testing.assert_close(state, expected)


def test_padding_changes_nothing_that_is_learned():
    # What is padded is 0, which norms make much of: rounding is to be told from learning.
    head, batch = made_head().double(), made_batch([(3, 6)])
    batch = replace(batch, features=batch.features.double())
    longer = made_batch([(3, 6), (9, 12)])
    alone = replace(
        longer,
        tokens=torch.cat([batch.tokens, torch.zeros(1, 12, dtype=torch.long)], 1)[:1],
        features=torch.cat([batch.features, torch.zeros(1, 12, 2 * WIDTH)], 1)[:1],
        prompts=longer.prompts[:1],
        lengths=longer.lengths[:1],
    )
    gradients = []
    for each in (batch, alone):
        head.zero_grad()
        sum(step.states.square().sum() for step in unroll(head, each, STEPS)).backward()
        gradients.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
