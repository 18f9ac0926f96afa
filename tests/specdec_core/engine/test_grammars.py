"""Output follows its grammar, and speculation leaves it what it was: the mask is applied at every
node of a tree, alike at target and draft."""

import json
import re
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.engine import Engine, Request
from specdec_core.engine.active_request import ActiveRequest
from specdec_core.tokens.grammar import Grammar, Grammars, Matcher
from specdec_core.tokens.token_tree import TokenOrigin
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.engine.test_text_warpers import DRAFTERS, PROMPTS
from tests.specdec_core.kinds import configured

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["draft", "tree"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", "(de|re)f[a-f0-9]{3,9}(,[a-z]+){2}"),
}
NEW = 40


def test_tokens_that_the_model_has_no_logits_for_are_never_allowed(tiny_pair):
    tokenizer, final = deepcopy(tiny_pair.tokenizer), frozenset({0})
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    matcher = Grammars(tokenizer, size, final).matcher(Grammar("regex", "(<extra>)+"))
    assert matcher.allowed([], [()]).shape == (1, size)
    assert all(token < size for token in matcher.forced([], 9))


def test_a_schema_that_is_nested_too_deeply_is_one_line():
    with pytest.raises(UserError, match="json_schema: not a JSON schema: "):
        Grammar("json_schema", "[" * 100_000).compiled()


def under(drafter, sampling):
    return configured(drafter and DRAFTERS[drafter], sampling)


def requests():
    return [
        Request(f"{name} {n}", prompt, NEW, seed=n, grammar=grammar)
        for name, grammar in GRAMMARS.items()
        for n, prompt in enumerate(PROMPTS)
    ]


@torch.inference_mode()
def masked(pair, request):
    """One token at a time, each the most likely one after which the text can be continued."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    matcher = LLMatcher(from_tokenizer(pair.tokenizer), request.grammar.compiled())
    output: list[int] = []
    while len(output) < NEW and output[-1:] != [0]:
        logits = pair.target(torch.tensor([[*request.tokens, *output]])).logits[0, -1]
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: len(logits)] > 0
        logits[~torch.from_numpy(allowed)] = -torch.inf
        output.append(int(logits.argmax()))
        matcher.consume_token(output[-1])
    return output


@pytest.fixture(scope="module")
def expected(tiny_pair):
    return [masked(tiny_pair, request) for request in requests()]


@pytest.mark.parametrize("drafter", [None, "chain", "tree", "target tree", "lookup", "cascade"])
def test_greedy_output_is_that_of_masked_decoding(tiny_pair, expected, drafter):
    generations = Engine(tiny_pair, under(drafter, Sampling()), 4).generate(requests())
    assert [g.tokens for g in generations] == expected
    assert {g.finish_reason for g in generations} == {"stop", "length"}


def test_an_asynchronous_draft_follows_the_grammar(tiny_pair, expected):
    link = InTurns(tiny_pair, seed=1)
    configuration = under(None, Sampling()).model_copy(update={"drafter": PearlSettings()})
    engine = Engine(linked(tiny_pair, link), configuration, 2)
    generations = engine.generate(requests()[:4])
    assert [g.tokens for g in generations] == expected[:4]
    assert sum(r.accepted for g in generations for r in g.rounds) > 3


def test_what_ends_by_itself_parses(tiny_pair):
    engine = Engine(tiny_pair, under("hybrid", Sampling(temperature=1.5)), 4)
    ended = 0
    asked = [replace(r, id=f"{r.id}/{n}", seed=n) for n in range(3) for r in requests()]
    for request, generation in zip(asked, engine.generate(asked), strict=True):
        if generation.finish_reason == "length":
            assert len(generation.tokens) == NEW
            continue
        ended += 1
        if request.grammar == GRAMMARS["regex"]:
            assert re.fullmatch(GRAMMARS["regex"].source, generation.text)
        else:
            value = json.loads(generation.text)
            assert not re.search(r"\s", re.sub(r'"(\\.|[^"])*"', "", generation.text))
            if request.grammar == GRAMMARS["schema"]:
                assert value.keys() == {"kind", "sizes"}
    assert ended > 5


def test_a_draft_like_its_target_is_always_right(tiny_pair):
    twins = replace(tiny_pair, drafts={"draft": tiny_pair.target})
    engine = Engine(twins, under("chain", Sampling(temperature=1.2)), 4)
    rounds = [r for g in engine.generate(requests()) for r in g.rounds]
    assert sum(r.drafted for r in rounds) > 40
    # A candidate that ends the text is accepted, and what was drafted behind it is not counted.
    assert sum(r.drafted - r.accepted for r in rounds) <= 2


# Sequences of at most four tokens: their masked probabilities are known one by one.

SHORT = Grammar("regex", "[ab]{1,3}(c[ab])?")
FORCED = Grammar("regex", "[ab]token[ab]")  # one text in the middle, in any tokens
TEXTS = {
    grammar: [
        text
        for length in lengths
        for text in map("".join, product(letters, repeat=length))
        if re.fullmatch(grammar.source, text)
    ]
    for grammar, letters, lengths in (
        (SHORT, ["a", "b", "c"], range(1, 6)),
        (FORCED, ["a", "b", "token"], [3]),
    )
}


@torch.inference_mode()
def exact(pair, grammar):
    """The probability of each text, by its tokens."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    ended: dict[tuple[int, ...], float] = {}
    while texts:
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in texts.items():
            logits = pair.target(torch.tensor([[*PROMPTS[0], *text]])).logits[0, -1].double()
            likely = possible(pair, grammar, text)
            total = sum(float(logits[t].exp()) for t in likely)
            for token in likely:
                kept = ended if token == 0 else longer
                kept[*text, token] = chance * float(logits[token].exp()) / total
        texts = longer
    return ended


def possible(pair, grammar, text):
    """The tokens that may follow `text` in a text of the grammar. Where only "token" can follow, it
    is written as the tokenizer writes it."""
    written = pair.tokenizer.decode(text)
    if grammar == FORCED and 0 < len(written) < len("atoken"):
        return {pair.tokenizer("atoken"[len(written) :])["input_ids"][0]}
    known = {token: pair.tokenizer.decode([token]) for token in range(1, len(pair.tokenizer))}
    likely = {token for token, more in known.items() if begins(grammar, written + more)}
    return likely | ({0} if written in TEXTS[grammar] else set())


def begins(grammar, text):
    """Whether a text of the grammar begins like this."""
    return any(whole.startswith(text) for whole in TEXTS[grammar])


def p_value(pair, drafter, samples, grammar=SHORT, right=True):
    engine = Engine(pair, under(drafter, Sampling(temperature=1.0)), 128)
    asked = [Request(str(n), PROMPTS[0], 12, seed=n, grammar=grammar) for n in range(samples)]
    generations = engine.generate(asked)
    forced = sum(origin == TokenOrigin.GRAMMAR for g in generations for origin in g.origins)
    assert (forced > samples / 10) == (right and grammar == FORCED)
    counts = Counter(tuple(g.tokens) for g in generations)
    wanted = {text: samples * chance for text, chance in exact(pair, grammar).items()}
    if not counts.keys() <= wanted.keys():
        return 0.0
    frequent = [text for text, count in wanted.items() if count >= 8]
    observed, due = [counts[t] for t in frequent], [wanted[t] for t in frequent]
    if len(frequent) < len(wanted):  # the rare ones together
        observed, due = [*observed, samples - sum(observed)], [*due, samples - sum(due)]
    return float(chisquare(observed, due).pvalue)


@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_samples_have_the_masked_targets_distribution(tiny_pair, drafter):
    assert p_value(tiny_pair, drafter, 600) > 1e-3


def test_a_long_forced_text_is_no_longer_than_what_a_round_may_add_to_the_cache(tiny_pair):
    engine = Engine(tiny_pair, configured({"kind": "prompt_lookup"}))
    request = Request("r", (5, 6), 180, grammar=Grammar("regex", "a{300}"))
    (found,) = engine.generate([request])
    assert max(r.depth for r in found.rounds) == engine.scheduler.limits.ahead


def test_tokens_that_the_grammar_forces_are_free_and_harmless(tiny_pair, monkeypatch):
    """They are always accepted, no model drafts them, and wrong ones would change nothing."""
    rounds = []
    account = ActiveRequest.account

    def counted(self, addition, *rest):
        if TokenOrigin.GRAMMAR in addition.tree.origins:
            rounds.append((len(addition.tree), len(addition.path), addition.tree.draft_forwards))
        return account(self, addition, *rest)

    monkeypatch.setattr(ActiveRequest, "account", counted)
    assert p_value(tiny_pair, "chain", 600, FORCED) > 1e-3
    assert rounds
    assert set(rounds) == {(2, 2, 0)}
    rounds.clear()
    monkeypatch.setattr(Matcher, "forced", lambda self, output, most: [70, 70])
    assert p_value(tiny_pair, "chain", 300, FORCED, right=False) > 1e-3
    assert set(rounds) == {(2, 0, 0)}


def test_that_notices_masks_of_other_nodes(tiny_pair, monkeypatch):
    whole = Matcher.allowed
    monkeypatch.setattr(
        Matcher, "allowed", lambda self, output, paths: whole(self, output, [()] * len(paths))
    )
    assert p_value(tiny_pair, "tree", 300) < 1e-9


@pytest.mark.parametrize(
    ("grammar", "wrong"),
    [
        (Grammar("json_schema", "{"), "json_schema: not a JSON schema"),
        (Grammar("json_schema", "[1]"), "json_schema: not a JSON schema"),
        (Grammar("json_schema", '{"type": "thing"}'), "json_schema: Invalid type: thing"),
        (Grammar("json_schema", '{"not": {}}'), "json_schema: Unimplemented keys"),
        (Grammar("regex", "("), "regex: .*unclosed group"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_line(tiny_pair, grammar, wrong):
    engine = Engine(tiny_pair, AUTOREGRESSIVE)
    with pytest.raises(UserError, match=wrong) as refused:
        engine.add(Request("r", PROMPTS[0], 4, grammar=grammar))
    assert "\n" not in str(refused.value)
    assert engine.idle
    with pytest.raises(UserError, match="neither min_tokens nor ignore_eos"):
        engine.add(Request("r", PROMPTS[0], 4, grammar=SHORT, ignore_eos=True))
