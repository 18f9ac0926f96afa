"""The policies taken from transformers draft what its own assisted generation drafts."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_curve
from transformers import AutoModelForCausalLM
from transformers.generation import AssistedCandidateGenerator

from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.dynamic_confidence import (
    DynamicConfidenceSettings,
    best_threshold,
)
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.engine import Engine, Request

Prompt = tuple[int, ...]
PROMPTS: list[Prompt] = [tuple(range(5, 5 + n)) for n in (3, 9, 17)]
NEW_TOKENS = 40


def of_sklearn(probabilities, accepted):
    """transformers' formula, as in `update_candidate_strategy`."""
    fpr, tpr, thresholds = roc_curve([int(a) for a in accepted], probabilities)
    return float(thresholds[np.argmin(fpr + 3 * (1 - tpr))])


@pytest.mark.parametrize("values", [3, 10, 10**6], ids=["many ties", "some ties", "no ties"])
def test_the_best_threshold_is_that_of_sklearns_roc_curve(values):
    rng = random.Random(values)
    compared = 0
    for _ in range(400):
        n = rng.randint(2, 60)
        probabilities = [rng.randint(1, values) / values for _ in range(n)]
        skill = rng.random()
        accepted = [rng.random() < skill * p + (1 - skill) / 2 for p in probabilities]
        if len(set(accepted)) == 2:
            expected = of_sklearn(probabilities, accepted)
            assert best_threshold(probabilities, accepted) == expected
            compared += 1
    assert compared > 300


@dataclass
class Decoded:
    """One text: its tokens, and for each round the candidates (drafted, accepted) and the
    confidence threshold behind it, where there is one."""

    tokens: list[int]
    rounds: list[tuple[int, int]] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)


def theirs(folders, monkeypatch, prompts, **settings):
    """What transformers does, one `generate` call a prompt with the same models. It drafts from the
    prompt on, the engine from the target's first token on: that is part of its prompts."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
        for name in ("target", "draft")
    )
    for name, value in settings.items():
        setattr(draft.generation_config, name, value)
    update = AssistedCandidateGenerator.update_candidate_strategy
    current = Decoded([])

    def spy(self, input_ids, scores, num_matches):
        current.rounds.append((scores.shape[1] - 1, int(num_matches)))
        update(self, input_ids, scores, num_matches)
        current.thresholds.append(self.generation_config.assistant_confidence_threshold)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", spy)
    texts = []
    for prompt in prompts:
        current = Decoded([])
        output = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=draft,
            do_sample=False,
            max_new_tokens=NEW_TOKENS - 1,
        )
        current.tokens = output[0, len(prompt) :].tolist()
        texts.append(current)
    return texts


def ours(pair, policy, prompts):
    """What the engine does after the first token, one request a prompt in the same slot."""
    engine = Engine(pair, Configuration(drafter=DraftModelSettings(policy=policy)))
    texts = []
    for prompt in prompts:
        text = Decoded([])
        for chunk in engine.stream(Request("r", prompt, NEW_TOKENS)):
            text.tokens += chunk.tokens
            if isinstance(policy, DynamicConfidenceSettings):
                text.thresholds.append(engine.drafter.policy.threshold(0))
            if chunk.finished:
                text.rounds = [(r.drafted, r.accepted) for r in chunk.finished.rounds]
        texts.append(Decoded(text.tokens[1:], text.rounds[1:], text.thresholds[1:]))
    return texts


def begun(pair, prompts):
    """The prompts, each with the target's first token."""
    generations = Engine(pair).generate([Request(str(n), p, 1) for n, p in enumerate(prompts)])
    return [(*p, *g.tokens) for p, g in zip(prompts, generations, strict=True)]


def test_dynamic_confidence_drafts_as_transformers_does(tiny_pair, tiny_pair_folders, monkeypatch):
    start, most = 0.05, 3
    expected = theirs(
        tiny_pair_folders,
        monkeypatch,
        begun(tiny_pair, PROMPTS),
        assistant_confidence_threshold=start,
        num_assistant_tokens=most,
        num_assistant_tokens_schedule="constant",
    )
    texts = ours(tiny_pair, DynamicConfidenceSettings(start=start, max_tokens=most), PROMPTS)
    for own, other in zip(texts, expected, strict=True):
        assert own.tokens == other.tokens
        # The last round is cut by the end of the text and counted differently.
        assert own.rounds[:-1] == other.rounds[:-1]
        assert own.thresholds[:-1] == pytest.approx(other.thresholds[:-1], rel=1e-4)
        assert own.thresholds[0] == start  # every text begins anew
    assert len({threshold for text in texts for threshold in text.thresholds}) > 4  # and moves


@pytest.mark.parametrize(("transient", "prompts"), [(True, PROMPTS), (False, PROMPTS[2:])])
def test_the_heuristic_drafts_as_transformers_does(
    tiny_pair, tiny_pair_folders, monkeypatch, transient, prompts
):
    """A lasting one within a sequence: over several, transformers counts otherwise."""
    expected = theirs(
        tiny_pair_folders,
        monkeypatch,
        begun(tiny_pair, prompts),
        assistant_confidence_threshold=0.0,
        num_assistant_tokens=3,
        num_assistant_tokens_schedule="heuristic_transient" if transient else "heuristic",
    )
    texts = ours(
        tiny_pair, HeuristicSettings(start=3, transient=transient, max_tokens=128), prompts
    )
    for own, other in zip(texts, expected, strict=True):
        assert own.tokens == other.tokens
        assert own.rounds[:-1] == other.rounds[:-1]
        assert own.rounds[0][0] == 3
        assert len({drafted for drafted, _ in own.rounds}) > 2
