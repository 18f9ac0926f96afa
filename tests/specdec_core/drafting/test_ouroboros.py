"""Ouroboros drafts and lengthens phrase by phrase, keeps its pool warm, and changes no text."""

from __future__ import annotations

import pytest

from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.post_use.settings import OuroborosSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts
from specdec_core.tokens.token_tree import TokenTree
from tests.specdec_core.drafting.reuse import (
    fit,
    generate,
    same_as_the_target_alone,
)

GREEDY = Sampling()
COUPLED = Sampling(temperature=1.0, coupling="gumbel")
DRAFTERS = {
    "defaults": OuroborosSettings(),
    "narrow": OuroborosSettings(max_tokens=4, phrases=1, phrase_length=2, window=1),
    "small-pool": OuroborosSettings(max_tokens=6, pool=5, per_key=2, window=12),
}


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_output_is_the_targets_own(
    tiny_pair: Pair, drafter: OuroborosSettings, sampling: Sampling
) -> None:
    assert same_as_the_target_alone(tiny_pair, drafter, sampling)


def test_the_line_of_guesses_alone_saves_forwards(tiny_pair: Pair) -> None:
    """Jacobi iteration: with no phrase ever found again, guesses still come true."""
    settings = OuroborosSettings(max_tokens=8, pool=1, per_key=1, phrase_length=1)
    guessed = Counts.of(generate(tiny_pair, settings))
    chain = DraftModelSettings(policy=FixedSettings(max_tokens=8))
    plain = Counts.of(generate(tiny_pair, chain))
    assert guessed.n_draft / guessed.n_target < 0.9 * plain.n_draft / plain.n_target


def test_the_pool_is_warm_for_the_next_request(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, Configuration(drafter=OuroborosSettings(max_tokens=2)))
    prompt = engine.encode("x = 1\ny = 2\n")
    first, second = (
        engine.generate([Request("0", prompt, 60, ignore_eos=True)])[0] for _ in range(2)
    )
    assert first.tokens == second.tokens
    assert second.counts.n_target < first.counts.n_target
    assert second.counts.n_draft < first.counts.n_draft


TOY = OuroborosSettings(draft="near", max_tokens=2, phrases=2, phrase_length=2, window=2)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3)],
    ids=["temperature", "top-k"],
)
def test_samples_have_the_targets_joint_distribution(sampling: Sampling) -> None:
    assert fit(TOY, sampling) > 1e-3


def test_the_next_line_is_what_the_draft_model_said_behind_the_last_one(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, Configuration(drafter=OuroborosSettings(window=4)))
    drafter, checked = engine.drafter, 0
    learn = drafter.learn

    def check(sequence: SlotState, drafted: list[int], outcome: object) -> None:
        nonlocal checked
        text = [*sequence.tokens, *drafted]
        tree: TokenTree = outcome.tree
        nodes = list(drafter._lines[sequence.slot].nodes)
        learn(sequence, drafted, outcome)
        line = drafter._lines[sequence.slot].tokens
        assert len(line) == 4
        decided = outcome.accepted + 1
        said = [outcome.choices[node + 1] for node in nodes[decided - 1 :]]
        assert line == [*said, *text[len(text) - (4 - len(said)) :]][:4]
        assert [tree.parents[node] for node in nodes[1:]] == nodes[:-1]
        checked += 1

    drafter.learn = check
    engine.generate([Request("0", engine.encode("x = 1\ny = 2\n"), 40, ignore_eos=True)])
    assert checked > 10
