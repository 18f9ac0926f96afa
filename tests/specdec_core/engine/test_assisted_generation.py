"""The policy taken from transformers drafts what its own assisted generation drafts."""

from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import AssistedCandidateGenerator

from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.engine import Engine, Request
from tests.conftest import generated

Prompt = tuple[int, ...]
PROMPTS: list[Prompt] = [tuple(range(5, 5 + n)) for n in (3, 9, 17)]
NEW_TOKENS = 40


@dataclass
class Decoded:
    """One text: its tokens, and for each round the candidates (drafted, accepted)."""

    tokens: list[int]
    rounds: list[tuple[int, int]] = field(default_factory=list)


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

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", spy)
    texts = []
    for prompt in prompts:
        current = Decoded([])
        current.tokens = generated(target, prompt, NEW_TOKENS - 1, assistant_model=draft)
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
            if chunk.finished:
                text.rounds = [(r.drafted, r.accepted) for r in chunk.finished.rounds]
        texts.append(Decoded(text.tokens[1:], text.rounds[1:]))
    return texts


def begun(pair, prompts):
    """The prompts, each with the target's first token."""
    generations = Engine(pair).generate([Request(str(n), p, 1) for n, p in enumerate(prompts)])
    return [(*p, *g.tokens) for p, g in zip(prompts, generations, strict=True)]


@pytest.mark.parametrize(("transient", "prompts"), [(True, PROMPTS), (False, PROMPTS[2:])])
def test_the_heuristic_drafts_as_transformers_does(
    tiny_pair, tiny_pair_folders, monkeypatch, transient, prompts
):
    """A lasting one within a sequence: over several, transformers counts otherwise."""
    settings = {
        "assistant_confidence_threshold": 0.0,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "heuristic_transient" if transient else "heuristic",
    }
    expected = theirs(tiny_pair_folders, monkeypatch, begun(tiny_pair, prompts), **settings)
    policy = HeuristicSettings(start=3, transient=transient, max_tokens=128)
    for own, other in zip(ours(tiny_pair, policy, prompts), expected, strict=True):
        assert own.tokens == other.tokens
        assert own.rounds[:-1] == other.rounds[:-1]
        assert own.rounds[0][0] == 3
        assert len({drafted for drafted, _ in own.rounds}) > 2
