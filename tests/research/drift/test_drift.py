"""Measures of drift: right on distributions that are known, and 0 where nothing drifts."""

import numpy as np
import pytest
import torch

from research.drift.drift import Written, scored, write
from specdec_core.config import Configuration, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import Counts


@torch.inference_mode()
def test_likelihoods_are_those_of_one_text_at_a_time(tiny_pair):
    generator = torch.Generator().manual_seed(0)
    texts = [
        (torch.randint(1, 300, (n,), generator=generator).tolist(), [7, 8, *range(9, 9 + n)])
        for n in (1, 5, 20)
    ]
    texts[0] = texts[0][0], greedy(tiny_pair, texts[0][0], 3)
    expected, agreeing = [], []
    for prompt, output in texts:
        total, chosen, text = 0.0, 0, list(prompt)
        for token in output:
            logits = tiny_pair.target(torch.tensor([text])).logits[0, -1]
            total += (logits.float() / 0.7).log_softmax(-1)[token].item()
            chosen += int(logits.argmax()) == token
            text.append(token)
        expected.append(total)
        agreeing.append(chosen)
    assert agreeing[0] == 3
    assert min(agreeing) < 3
    found = scored(tiny_pair, texts, 0.7)
    assert found[0] == pytest.approx(expected, abs=1e-3)
    assert found[1] == agreeing


def greedy(pair, prompt, new_tokens):
    [generation] = Engine(pair).generate([Request("greedy", tuple(prompt), new_tokens)])
    return generation.tokens


def test_a_configuration_writes_texts_that_are_scored_by_prompt(tiny_pair):
    prompts = [(5, 6, 7), tuple(range(9, 30))]
    configuration = Configuration(sampling=Sampling(temperature=0.7))
    written = write(tiny_pair, configuration, prompts, texts=3, max_new_tokens=6)
    requests = [Request(str(i), prompts[i // 3], 6, seed=i) for i in range(6)]
    outputs = [g.tokens for g in Engine(tiny_pair, configuration).generate(requests)]
    scores, agreeing = scored(
        tiny_pair, [(r.tokens, o) for r, o in zip(requests, outputs, strict=True)], 0.7
    )
    assert written.log_likelihood == pytest.approx([sum(scores[:3]), sum(scores[3:])], abs=1e-3)
    assert written.tokens.tolist() == [sum(map(len, outputs[:3])), sum(map(len, outputs[3:]))]
    assert written.agreeing.tolist() == [sum(agreeing[:3]), sum(agreeing[3:])]
    assert written.interval().value == pytest.approx(sum(scores) / sum(map(len, outputs)), abs=1e-4)


def test_prompts_are_compared_in_pairs():
    rng = np.random.default_rng(0)
    tokens = np.full(30, 64)
    hardness = rng.normal(-3, 1, 30)  # prompts differ more than methods do
    alone = Written(Counts.of([]), 64 * hardness, tokens, tokens)
    other = Written(Counts.of([]), 64 * (hardness + 0.1 + rng.normal(0, 0.05, 30)), tokens, tokens)
    change = other.against(alone)
    assert change.low < 0.1 < change.high
    assert change.low > 0 or change.high < 0
    assert change.high - change.low < 0.1 * (alone.interval().high - alone.interval().low)
    assert alone.against(alone).value == 0
