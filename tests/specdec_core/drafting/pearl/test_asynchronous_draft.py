"""The draft process and its messages follow from those that it received."""

import pickle
import random
from threading import Event
from time import monotonic, sleep

import pytest
import torch

from specdec_core.config import Sampling
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.pearl import messages
from specdec_core.drafting.pearl.asynchronous_draft import AsynchronousDraft
from specdec_core.drafting.pearl.messages import (
    Begin,
    Commit,
    Compiling,
    Configure,
    Configured,
    Distribution,
    Drafted,
    End,
    Message,
    Pause,
    RequestDistribution,
    decode,
    encode,
)
from specdec_core.drafting.policies.fixed import FixedPolicy, FixedSettings
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.drafting.token_cache import TokenCacheSettings
from specdec_core.tokens.grammar import Grammar, Grammars
from specdec_core.tokens.text_warper import TextRules

PROMPT = "def main():\n    return"
POLICY = FixedSettings(max_tokens=4)
PLAIN = DraftModelSettings(policy=POLICY)
LOOKUPS = [
    PromptLookupSettings(max_tokens=5),
    SuffixSettings(tree=True, max_tokens=8, memory="all"),
    TokenCacheSettings(from_prompt=True),
]
GREEDY, COUPLED = Sampling(), Sampling(temperature=1.0, coupling="gumbel")


class Told:
    """Texts by the numbers of their last tokens, as a target's side may know them."""

    def __init__(self, pair, width, sampling=GREEDY, drafter=PLAIN):
        self.sent: list = []
        self.draft = AsynchronousDraft(pair, self.sent.append)
        self.draft.handle(
            Configure(drafter, 1, 9, width, 1e-4, pair.target.config.vocab_size, frozenset())
        )
        assert self.sent == [Configured(pair.max_length)]
        self.text = list(pair.tokenizer(PROMPT)["input_ids"])
        self.draft.handle(Begin(0, -1, self.text, 400, sampling, 0))
        self.texts = {-1: tuple(self.text)}
        self.drawn: dict[tuple[int, ...], int] = {}
        self.guessed: set[tuple[int, ...]] = set()
        self.pauses: list[int] = []  # how long the text is there
        self.most = 0  # candidates by one forward

    def hear(self):
        for message in self.sent:
            if isinstance(message, Pause):
                self.pauses.append(len(self.texts[message.node]))
            elif isinstance(message, Drafted):
                self.most = max(self.most, message.candidates)
                for number, parent, token, drawn, _ in message.tokens:
                    before = self.texts[parent]
                    self.texts[number] = (*before, token)
                    if drawn:
                        self.drawn[before] = token
                    else:
                        self.guessed.add((*before, token))
        self.sent.clear()

    def chain(self):
        found: list[int] = []
        while (token := self.drawn.get((*self.text, *found))) is not None:
            found.append(token)
        return found

    def say(self, tokens):
        # The target has read all candidates: those that it accepted and the one that it did not.
        drafted = min(len(tokens), len(self.chain()))
        self.text += tokens
        choices = [*tokens, *[0] * (drafted + 1 - len(tokens))]
        self.draft.handle(Commit(0, tokens, drafted, len(tokens) - 1, choices))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("lookup", [None, *LOOKUPS], ids=lambda own: own.kind if own else "alone")
def test_candidates_are_the_drafts_own_whatever_the_target_says(tiny_pair, width, lookup):
    """Also after the cache has lost and kept parts of the tree many times, and whatever a lookup
    has guessed."""
    drafter = PLAIN if lookup is None else CascadeSettings(proposer=lookup, policy=POLICY)
    told, chance = Told(tiny_pair, width, drafter=drafter), random.Random(0)
    [draft] = tiny_pair.drafts.values()
    ready = 0
    for _ in range(30):
        for _ in range(chance.randrange(9)):
            told.draft.draft()
        told.hear()
        chain = told.chain()
        agreed = chain[: chance.randrange(len(chain) + 1)]
        guesses = [text[-1] for text in told.guessed if text[:-1] == (*told.text, *agreed)]
        own = chance.choice([*guesses, chance.randrange(5, 50)])
        told.say([*agreed, own])
        ready += bool(told.chain())
    assert bool(ready) == (width > 1)
    assert (told.most > 1) == (lookup is not None)
    assert len(told.drawn) > 50
    for text, token in told.drawn.items():
        with torch.inference_mode():
            logits = draft(torch.tensor([text])).logits[0, -1]
        assert logits[token] >= logits.max() - 1e-4


@pytest.mark.parametrize("drafter", [PLAIN, CascadeSettings(policy=POLICY)], ids=lambda d: d.kind)
def test_no_more_is_drafted_ahead_than_was_asked_for(tiny_pair, drafter):
    told = Told(tiny_pair, 3, drafter=drafter)
    while told.draft.draft():
        told.hear()
    assert len(told.chain()) == 9
    longest = max(map(len, told.texts.values()))
    assert longest == len(told.text) + 9
    told.say(told.chain()[:4])
    assert told.draft.draft()


@pytest.mark.parametrize("drafter", [PLAIN, CascadeSettings(policy=POLICY)], ids=lambda d: d.kind)
def test_the_policy_is_asked_about_the_chain_alone(tiny_pair, drafter):
    """One of its tokens after the other, however many came of one forward; and about those behind
    a pause once it is known what became of the ones before."""
    told = Told(tiny_pair, 4, drafter=drafter)
    prompt = len(told.text)
    while told.draft.draft():
        told.hear()
    assert told.pauses == [prompt + 4]
    told.say(told.chain()[:2])
    told.hear()
    assert told.pauses == [prompt + 4]
    told.say(told.chain()[:2])
    told.hear()
    assert told.pauses == [prompt + 4, prompt + 8]


@pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda own: own.kind)
def test_the_policy_is_told_how_many_forwards_brought_its_candidates(
    tiny_pair, lookup, monkeypatch
):
    outcomes: list[PolicyOutcome] = []
    monkeypatch.setattr(
        FixedPolicy, "observe", lambda self, slot, outcome: outcomes.append(outcome)
    )
    cascade = CascadeSettings(proposer=lookup, policy=FixedSettings(max_tokens=9))
    told, expected = Told(tiny_pair, 1, drafter=cascade), []
    for _ in range(8):
        calls = 0
        while told.draft.draft():
            calls += 1
        told.hear()
        told.say(told.chain())
        expected.append(PolicyOutcome(9, 9, calls))
    assert outcomes == expected
    assert any(outcome.draft_calls < 9 for outcome in outcomes)


def test_a_lookup_learns_what_became_of_the_chain_and_how_the_text_ended(tiny_pair):
    cache = TokenCacheSettings(phrase_length=3, memory="all")
    told = Told(tiny_pair, 1, drafter=CascadeSettings(proposer=cache, policy=POLICY))
    for _ in range(3):
        told.draft.draft()
    told.hear()
    first, second, third = told.chain()[:3]
    # The first was rejected; behind it the target would have said the second and then the third.
    told.draft.handle(Commit(0, [7], 3, 0, [7, second, third, 9]))
    told.draft.handle(End(0, [30, 31, 32]))
    told.draft.handle(Begin(0, -2, told.text, 400, GREEDY, 0))
    sequence = told.draft._slots[0].state
    known = told.draft._lookup.phrases(sequence, first, 20)
    assert (second, third, 9)[: len(known[0])] == known[0]
    assert (30, 31, 32) in told.draft._lookup.phrases(sequence, 7, 20)


def test_a_distribution_is_what_the_token_behind_was_drawn_from(tiny_pair):
    sampling = Sampling(temperature=0.8)
    told = Told(tiny_pair, 2, sampling)
    for _ in range(4):
        told.draft.draft()
    [first, *_] = [m for m in told.sent if isinstance(m, Drafted)]
    [token] = [s for s in first.tokens if s[1] == -1 and s[3]]
    told.draft.handle(RequestDistribution(0, -1))
    answer = told.sent[-1]
    [draft] = tiny_pair.drafts.values()
    with torch.inference_mode():
        expected = (draft(torch.tensor([told.text])).logits[0, -1] / 0.8).softmax(-1)
    assert torch.allclose(answer.tensor(), expected[: answer.size], atol=1e-5)
    assert token[4] == pytest.approx(float(answer.tensor()[token[2]]))


def test_coupled_candidates_are_those_that_the_shared_noise_chooses(tiny_pair):
    cascade = CascadeSettings(proposer=LOOKUPS[2], policy=POLICY)
    first, *others = (
        Told(tiny_pair, 1, COUPLED),
        Told(tiny_pair, 4, COUPLED),
        Told(tiny_pair, 1, COUPLED, cascade),
    )
    for told in (first, *others):
        while told.draft.draft():
            told.hear()
    assert all(told.chain() == first.chain() for told in others)


def drafted(told, slot):
    """The tokens of the slot that the draft has sent since the last call."""
    sent = [message for message in told.sent if isinstance(message, Drafted)]
    told.sent.clear()
    return [token[2] for message in sent if message.slot == slot for token in message.tokens]


@pytest.fixture
def may_compile(monkeypatch):
    """An event that the compilation of every grammar waits for."""
    begin, plain = Event(), Grammars._compile

    def slowly(self, grammar):
        begin.wait(10)
        return plain(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    return begin


def test_a_slot_whose_grammar_is_compiled_keeps_no_other_waiting(tiny_pair, may_compile):
    told, size = Told(tiny_pair, 1), tiny_pair.target.config.vocab_size
    final = tiny_pair.eos_token_ids
    told.draft.handle(Configure(PLAIN, 2, 4, 1, 1e-4, size, final))
    told.draft.handle(Begin(0, -1, told.text, 400, GREEDY, 0))
    rules = TextRules(GREEDY, len(told.text), final=final, grammar=Grammar("regex", "[de]{30}"))
    told.draft.handle(Begin(1, -2, told.text, 400, GREEDY, 0, rules))
    assert Compiling(1, -2) in told.sent
    for _ in range(3):
        assert told.draft.draft()
    [follows] = tiny_pair.tokenizer("d")["input_ids"]
    told.draft.handle(Commit(1, [follows], 0, 0, []))
    assert len(drafted(told, 0)) == 3
    assert told.draft.compiling
    may_compile.set()
    until, tokens = monotonic() + 30, []
    while len(tokens) < 3 and monotonic() < until:
        told.draft.draft()
        tokens += drafted(told, 1)
        sleep(0.001)
    assert not told.draft.compiling
    # The token that the target has confirmed meanwhile, then those that the grammar allows.
    assert tokens[0] == follows
    assert set(tiny_pair.tokenizer.decode(tokens)) <= set("de")


def test_a_sequence_that_ends_or_begins_anew_while_its_grammar_is_compiled_is_forgotten(
    tiny_pair, may_compile
):
    told = Told(tiny_pair, 1)
    rules = TextRules(GREEDY, len(told.text), grammar=Grammar("regex", "[de]{30}"))
    under = Begin(0, -2, told.text, 400, GREEDY, 0, rules)
    told.draft.handle(under)
    told.draft.handle(End(0, []))
    assert not told.draft.compiling
    told.draft.handle(under)
    told.draft.handle(Begin(0, -3, told.text, 400, GREEDY, 0))
    assert not told.draft.compiling
    may_compile.set()
    assert told.draft.draft()
    [message] = [message for message in told.sent if isinstance(message, Drafted)]
    assert message.tokens[0][1] == -3


# What is compiled for a model stays where it is.
GRAMMAR = Grammar("regex", "a+", program=object())
RULES = TextRules(Sampling(logit_bias={3: -1.0}), 4, 1, frozenset({2}), GRAMMAR)
SPARSE, DENSE = torch.tensor([0.0] * 90 + [0.5]), torch.rand(100)
MESSAGES: list[Message] = [
    Configure(DraftModelSettings(), 4, 8, 2, 0.1, 320, frozenset({1, 2})),
    Configured(1024),
    Configured(0, "ein Entwurf für später"),
    Begin(1, 2, [3, 4], 9, Sampling(temperature=0.7, top_k=3), 2**70, RULES),
    Commit(1, [2, 3], 3, 2, [1, 2]),
    End(1, []),
    RequestDistribution(1, 2),
    Drafted(1, [(1, 0, 5, True, None), (2, 1, 5, False, 0.3)], 1, 2, 0.1, 0.2),
    Pause(1, 2),
    Compiling(1, 2),
    Distribution.of(0, 1, SPARSE),
    Distribution.of(0, 1, DENSE),
]


def test_messages_come_back_as_they_were():
    assert {type(message) for message in MESSAGES} == set(messages._KINDS)
    for message in MESSAGES:
        found = decode(encode(message))
        assert (type(found), found) == (type(message), message)
    for dense, message in zip((SPARSE, DENSE), MESSAGES[-2:], strict=True):
        found = decode(encode(message))
        assert torch.equal(found.tensor(), dense)


@pytest.mark.parametrize("kind", range(len(messages._KINDS)))
def test_a_pickle_is_no_message(kind):
    with pytest.raises(ValueError, match="Invalid JSON"):
        decode(bytes([kind]) + pickle.dumps(print))
