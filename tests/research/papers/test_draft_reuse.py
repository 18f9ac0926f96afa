"""A recording tells the best length of each round, and which phrases are drafted again."""

import numpy as np
import pandas as pd
import pytest

from research.papers.draft_reuse import (
    DRAFT_CALL,
    DRAFTED,
    REJECTED,
    TARGET_CALL,
    best_lengths,
    post_use_speedup,
    recycled,
)
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine
from specdec_core.recordings.replay import Replay
from tests.specdec_core.recordings.test_record import record, requests

COST, PROMPTS, K = 4.0, 4, 6


@pytest.fixture(scope="module")
def replay(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    return Replay(record(tiny_pair, folder, prompts=PROMPTS, max_draft=10))


def decoding(pair, length):
    policy = FixedSettings(max_tokens=length)
    return Engine(pair, Configuration(drafter=DraftModelSettings(policy=policy)))


def test_the_best_length_of_a_round_is_what_the_target_accepts(tiny_pair, replay):
    found = best_lengths(replay, COST)
    live = decoding(tiny_pair, found.fixed).generate(requests(PROMPTS))
    rounds = {(g.request_id, n): r for g in live for n, r in enumerate(g.rounds)}
    assert len(found.rounds) > 20
    for row in found.rounds.itertuples():
        decoded = rounds[row.request, row.round]
        if decoded.accepted < decoded.drafted:
            assert row.length == decoded.accepted
        else:
            assert row.length >= decoded.accepted
    assert found.rounds["length"].max() > found.fixed  # not cut where the draft is


def test_the_best_fixed_length_is_the_fastest_by_the_papers_equation(tiny_pair, replay):
    found = best_lengths(replay, COST)
    assert list(found.lengths["length"]) == list(range(1, 11))
    speeds = {}
    for length in (1, found.fixed, 10):
        counts = [g.counts for g in decoding(tiny_pair, length).generate(requests(PROMPTS))]
        n, n_draft, n_target = (
            sum(getattr(c, k) for c in counts) for k in ("n", "n_draft", "n_target")
        )
        speeds[length] = post_use_speedup(n / n_target, n / n_draft, COST)
        [told] = found.lengths["speedup"][found.lengths["length"] == length]
        assert told == pytest.approx(speeds[length])
    assert max(speeds, key=lambda length: speeds[length]) == found.fixed


def naive(pair, generations, rounds):
    """The shares by the definition, from rounds as they were decoded: the request, the text before
    a round, its chain, and the accepted tokens."""
    rows = []
    texts = {g.request_id: g.tokens for g in generations}
    for number, (request, position, before, chain, accepted) in enumerate(rounds):
        earlier = [r for r in rounds[:number] if r[0] == request]
        output = texts[request]
        end = position + accepted + 1
        cases = [(DRAFT_CALL, [before, *chain], earlier, len(chain))]
        cases += [(TARGET_CALL, output[end - 1 :], [*earlier, rounds[number]], 1)]
        for call, tokens, known, starts in cases:
            for start in range(starts):
                for size in range(1, 6):
                    phrase = tokens[start : start + size + 1]
                    if len(phrase) < size + 1:
                        continue
                    for of in (DRAFTED, REJECTED):
                        again = any(
                            [b, *c][s : s + size + 1] == phrase
                            for _, _, b, c, a in known
                            for s in range(a if of == REJECTED else 0, len(c))
                        )
                        rows.append((call, size, of, again))
    frame = pd.DataFrame(rows, columns=["call", "tokens", "of", "again"])
    return frame.groupby(["call", "tokens", "of"])["again"].agg(["size", "mean"]).reset_index()


def test_phrases_that_come_again_are_those_of_decoding(tiny_pair, replay):
    engine = decoding(tiny_pair, K)
    propose, observe = engine.drafter.propose, engine.drafter.observe
    rounds: list[tuple] = []
    lengths = {tuple(r.tokens): r.id for r in requests(PROMPTS)}

    def watch(sequences):
        trees = propose(sequences)
        [sequence], [tree] = sequences, trees
        prompt = tuple(sequence.tokens[:3])
        if len(tree):
            position = len(sequence.tokens) - 3
            rounds.append((lengths[prompt], position, sequence.tokens[-1], tree.tokens, 0))
        return trees

    def listen(sequence, outcome):
        if len(outcome.tree):
            rounds[-1] = (*rounds[-1][:4], outcome.accepted)
        observe(sequence, outcome)

    engine.drafter.propose, engine.drafter.observe = watch, listen
    generations = engine.generate(requests(PROMPTS))
    # What a request's last round accepted is not told to its drafter.
    accepted = {(g.request_id, r.position): r.accepted for g in generations for r in g.rounds}
    rounds = [(*r[:4], accepted[r[0], r[1]]) for r in rounds]
    expected = naive(tiny_pair, generations, rounds)
    found = recycled(replay, length=K)
    assert found["share"].between(0.01, 0.99).any()
    assert list(found["call"]) == list(expected["call"])
    assert list(found["calls"]) == list(expected["size"])
    np.testing.assert_allclose(found["share"], expected["mean"])
