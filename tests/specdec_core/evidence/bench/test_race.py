"""Everybody is timed alike, and what differs from a reference is found."""

import numpy as np
import pytest

from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.engine import Engine
from specdec_core.evidence.bench.race import (
    FEW,
    DecodedOnce,
    EngineContestant,
    PeerContestant,
    race,
)
from specdec_core.evidence.bench.result import Take
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.losses import ATTEMPTS, again_if_lost
from specdec_core.measure.parts import Parts
from specdec_core.models.runner import CacheLost
from specdec_core.prompts.conversation import Conversation, conversations
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.servers.peer import Peer
from tests.bench_race import CHAIN, NEW_TOKENS
from tests.observers import Heard
from tests.peers import peers_of

GREEDY = [Sampling()]


class OffByOne(Peer):
    """transformers' own decoding with one token altered."""

    def __init__(self, peer, place):
        self.name, self.version, self.settings = "altered", peer.version, peer.settings
        self.peer, self.place = peer, place
        self.forgot = 0

    def open(self):
        self.peer.open()

    def decode(self, prompt_tokens, max_new_tokens, *asked):
        tokens = self.peer.decode(prompt_tokens, max_new_tokens, *asked)
        tokens[self.place] += 1
        return tokens

    def forget(self):
        self.forgot += 1


def test_every_contestant_decodes_every_prompt_and_agrees_in_float32(bench_result):
    ours, theirs = (bench_result.at(0.0, group) for group in ("specdec", "transformers"))
    assert len(ours) == 2
    assert len(theirs) == 3
    for row in bench_result.rows:
        assert row.paces().shape == (2, 3)
        assert (row.paces() > 0).all()
    for row in (*ours, *theirs):
        assert row.agreement(ours[0]).complete, row.name
        assert row.agreement(theirs[0]).complete, row.name
    assert not bench_result.unequal()


def test_a_contestant_that_alters_a_token_is_caught(tiny_pair):
    prompts = [Prompt("0", "def main("), Prompt("1", "x = 1 +")]
    asked = conversations(prompts, tiny_pair.tokenizer, NEW_TOKENS, tiny_pair.max_length)
    (peer, *_) = peers_of(tiny_pair, "transformers")
    with OffByOne(peer, 4) as altered:
        everybody = [
            EngineContestant(Engine(tiny_pair), AUTOREGRESSIVE, ""),
            PeerContestant(altered, "t", False),
        ]
        reference, row = race(everybody, asked, NEW_TOKENS, GREEDY, repeats=2)
    found = row.agreement(reference)
    assert (found.compared, found.equal, found.first) == (4, 0, 4)
    assert altered.forgot == 3  # before the warm-up and before each repeat, in which no text recurs
    assert reference.agreement(reference).complete


class Noted:
    """A contestant that puts its name down; from the `last` time on it fails."""

    def __init__(self, name, order, last=None, error=KeyboardInterrupt):
        self.name, self.order, self.last, self.error = name, order, last, error

    def row(self, temperature):
        return EngineContestant(None, AUTOREGRESSIVE, self.name).row(temperature)

    def begin(self):
        pass

    def decode(self, *_):
        if len(self.order) == self.last:
            raise self.error
        self.order.append(self.name)
        return DecodedOnce([len(self.order)])


def asked_of_noted(texts="xy"):
    def whole(text):
        return {"input_ids": [ord(c) for c in text]}

    return [Conversation(Prompt(text, text), whole) for text in texts]


def in_turns(*turns):
    return [name for turn in turns for name in interleaved("abc", turn)]


def test_the_order_is_another_one_each_time():
    order: list[str] = []
    race([Noted(name, order) for name in "abc"], asked_of_noted(), 1, GREEDY, repeats=2)
    assert order[6:] == in_turns(0, 1, 2, 3)  # behind the warm-up


def test_a_second_temperature_warms_up_with_a_few_prompts():
    order: list[str] = []
    alone, asked = [Noted("a", order)], asked_of_noted("uvwxyz")
    race(alone, asked, 1, [*GREEDY, Sampling(temperature=1.0)], repeats=2)
    assert len(order) == 6 + 2 * 6 + FEW + 2 * 6


def test_an_interrupted_race_goes_on_with_the_repeat_that_it_was_at(tmp_path):
    order: list[str] = []
    several = [Noted(name, order, last=14) for name in "abc"]
    with Parts.open(tmp_path, {}, Take) as parts, pytest.raises(KeyboardInterrupt):
        race(several, asked_of_noted(), 1, GREEDY, repeats=3, parts=parts)
    again: list[str] = []
    with Parts.open(tmp_path, {}, Take) as parts:
        several = [Noted(name, again) for name in "abc"]
        rows = race(several, asked_of_noted(), 1, GREEDY, repeats=3, parts=parts)
        assert "resumed" in parts.notes[0]
    assert again[6:] == in_turns(2, 3, 4, 5)  # the first repeat is there
    outputs = [[take.outputs for take in takes] for takes in rows[0].takes]
    assert outputs[0] == [[[order.index("a", 6) + 1]], [[order.index("a", 9) + 1]]]
    assert all(len(row.takes) == 3 for row in rows)
    with Parts.open(tmp_path, {}, Take) as parts:  # another temperature has other turns
        later: list[str] = []
        samplings = [*GREEDY, Sampling(temperature=1.0)]
        race([Noted("a", later)], asked_of_noted(), 1, samplings, 3, parts=parts)
    assert later == ["a"] * (2 + 3 * 2)  # greedy repeats are there


def test_a_repeat_in_which_a_process_was_lost_is_made_again():
    order: list[str] = []
    *first, third = in_turns(0)
    lost = {third: (8, CacheLost("gone"))}
    losing = [Noted(name, order, *lost.get(name, ())) for name in "abc"]
    heard = Heard()
    rows = race(losing, asked_of_noted(), 1, GREEDY, repeats=2, observer=heard)
    assert order[6:] == [*first, *in_turns(0, 1, 2, 3)]
    assert [len(takes) for row in rows for takes in row.takes] == [2] * 6
    assert heard.warnings == ["gone; what it disturbed is measured again"]


def test_a_process_that_is_lost_again_and_again_is_an_error():
    heard, tried = Heard(), []

    def measure():
        tried.append(1)
        raise CacheLost("gone")

    with pytest.raises(CacheLost, match="gone"):
        again_if_lost(measure, heard)
    assert (len(tried), len(heard.warnings)) == (ATTEMPTS, ATTEMPTS - 1)


def test_what_was_learned_is_forgotten_between_repeats(tiny_pair):
    """Else the second repeat would find its own output, and be faster than any user's request."""
    drafter = SuffixSettings(memory="all")
    asked = conversations(
        [Prompt("0", "def main("), Prompt("1", "def main(")], tiny_pair.tokenizer, 24, 256
    )
    own = EngineContestant(Engine(tiny_pair), Configuration(drafter=drafter), "")
    (row,) = race([own], asked, 24, GREEDY, repeats=2)
    first, second = ([len(take.accepted) for take in takes] for takes in row.takes)
    assert first == second
    assert first[1] < first[0]  # the same prompt again, within a repeat


def test_sampled_takes_are_drawn_anew_in_every_repeat(bench_result):
    row = bench_result.at(1.0, "specdec")[1]
    assert row.configuration == CHAIN
    first, second = ([take.written for take in takes] for takes in row.takes)
    assert first != second
    assert np.isfinite(row.tokens_per_second)
