"""A request's first round prefills its whole prompt and has no candidates, with every drafter; its
first token waits for no draft, and drafts follow the target."""

from collections import Counter
from typing import Any

import pytest

from specdec_core.config import Configuration
from specdec_core.config.kinds import DRAFTERS
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.runner import Batch, ModelRunner
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.drafting.proofs import PROMPTS
from tests.specdec_core.kinds import chain, configured, drafter

CHAIN = chain(max_tokens=4)
FOLLOWING: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "tree": {"kind": "tree", "branching": [3, 2, 1]},
    "dynamic tree": {"kind": "dynamic_tree"},
    "cascade": {"kind": "cascade"},
    "hybrid": {"kind": "hybrid", "otherwise": CHAIN},
    "schedule": {"kind": "schedule", "ranges": {1: 4, 2: {"kind": "suffix"}, 3: 2}},
    "bandit": {"kind": "bandit", "arms": [1, 4, {"kind": "suffix"}]},
}


def calls(engine, monkeypatch):
    """The forwards of the engine's models, as they come."""
    made: list[tuple[str, Batch]] = []
    forward = ModelRunner.forward

    def logged(self, batch):
        made.append(("target" if self is engine.target else "draft", batch))
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", logged)
    return made


@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_drafter_is_asked_in_the_first_round(tiny_pair, kind, bare_home, monkeypatch):
    link = InTurns(tiny_pair, seed=1)  # to PEARL's draft
    engine = Engine(linked(tiny_pair, link), Configuration(drafter=drafter(kind)), 3)
    asked, missed = Counter[int](), Counter[int]()
    propose, miss = engine.drafter.propose, engine.drafter.missed

    def proposing(sequences):
        asked.update(id(sequence) for sequence in sequences)
        return propose(sequences)

    def missing(sequence):
        assert not asked[id(sequence)]
        missed[id(sequence)] += 1
        miss(sequence)

    monkeypatch.setattr(engine.drafter, "propose", proposing)
    monkeypatch.setattr(engine.drafter, "missed", missing)
    expected = Engine(tiny_pair).generate([Request("r", PROMPTS[0], 24, ignore_eos=True)])[0]
    requests = [Request(str(n), p, 24, seed=n, ignore_eos=True) for n, p in enumerate(PROMPTS[:3])]
    generations = engine.generate(requests)
    assert list(missed.values()) == [1, 1, 1]
    # The first round draws the first token of a tree.
    begins = engine.configuration.drafter.target_started
    for generation in generations:
        first, *rounds = generation.rounds
        assert (first.position, first.drafted, first.accepted) == (0, 0, 0)
        assert (first.draft_forwards, first.draft_tokens, first.arm) == (0, 0, None)
        assert first.generated == (0 if begins else 1)
        assert rounds[0].position == first.generated
    assert sum(asked.values()) == sum(len(g.rounds) - 1 for g in generations)
    if engine.configuration.lossless:
        assert generations[0].tokens == expected.tokens


def test_the_first_token_waits_for_no_draft(tiny_pair, monkeypatch):
    engine = Engine(tiny_pair, configured(CHAIN))
    made = calls(engine, monkeypatch)
    prompt = tuple(range(5, 35))
    engine.add(Request("r", prompt, 9, ignore_eos=True))
    [chunk] = engine.step()
    assert len(chunk.tokens) == 1
    [(model, batch)] = made
    assert (model, batch.tokens) == ("target", [list(prompt)]), "one forward, of all the prompt"
    assert batch.counts == [1], "logits that are not needed"
    made.clear()
    engine.step()
    assert [model for model, _ in made] == ["draft"] * 5 + ["target"]
    assert made[0][1].tokens == [list(prompt)]
    assert made[0][1].counts == [0]
    assert made[1][1].tokens == [chunk.tokens]
    assert made[-1][1].counts == [5]


@pytest.mark.parametrize("given", FOLLOWING.values(), ids=FOLLOWING)
def test_drafts_read_what_the_target_has_read(tiny_pair, given, monkeypatch):
    """Of a text all tokens before the one that a draft reads are in the target's cache: also while
    prompts are read in chunks, after a request was preempted, and where prompts begin alike."""
    asked = [
        Request(str(n), (*range(5, 35), *range(40 + n, 64)), 30, ignore_eos=True) for n in range(4)
    ]
    alone = Engine(tiny_pair).generate(asked)
    limits = Limits(4, step_tokens=40, cache_tokens=512, share_prefixes=True)
    engine = Engine(tiny_pair, configured(given), limits=limits)
    forward, read, missed = ModelRunner.forward, 0, Counter[int]()
    miss = engine.drafter.missed

    def watched(self, batch):
        nonlocal read
        if self is not engine.target:
            for row, tokens in zip(batch.rows, batch.tokens, strict=True):
                request, start = engine._active[row], self.lengths[row]
                text = min(start + len(tokens), len(request.state.tokens))
                assert text - 1 <= engine.target.lengths[row]
                if not request.begun:
                    assert start + len(tokens) <= engine.target.lengths[row]
                read += max(text - start, 0)
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", watched)
    monkeypatch.setattr(engine.drafter, "missed", lambda s: (missed.update([id(s)]), miss(s)))
    generations = engine.generate(asked)
    assert engine.scheduler.preemptions
    assert read > 100
    assert list(missed.values()) == [1] * 4, "preempted requests have had their first round"
    assert [g.tokens for g in generations] == [g.tokens for g in alone]
