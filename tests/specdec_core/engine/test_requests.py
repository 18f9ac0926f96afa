"""Requests with limits of their own, and sequences that are continued."""

from dataclasses import replace

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.engine.turns import requests_of
from specdec_core.prompts.chat import rendered
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.token_tree import TokenOrigin
from tests.specdec_core.engine.test_text_warpers import DRAFTERS, PROMPTS
from tests.specdec_core.kinds import chain, configured

NEW = 24
SAMPLINGS = {
    "greedy": Sampling(repetition_penalty=1.2),
    "rejection": Sampling(temperature=0.8, top_k=20),
    "coupled": Sampling(temperature=0.8, coupling="gumbel"),
}


def under(drafter, sampling=None):
    return configured(DRAFTERS[drafter], sampling)


def requests(**options):
    asked = {"max_new_tokens": NEW, **options}
    return [Request(str(n), prompt, seed=n, **asked) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        *(("chain", "greedy"), ("chain", "coupled")),
        *(("tree", "rejection"), ("target tree", "rejection")),
    ],
)
def test_log_probabilities_are_those_of_one_forward_over_the_text(tiny_pair, drafter, sampling):
    engine = Engine(tiny_pair, under(drafter, SAMPLINGS[sampling]), 2)
    stop = Engine(tiny_pair, engine.configuration).generate(requests(ignore_eos=True))[1].text[9:12]
    for request in requests(logprobs=3, ignore_eos=True, stop=(stop,)):
        engine.add(request)
    chunks = [chunk for _ in iter(lambda: engine.idle, True) for chunk in engine.step()]
    origins = set()
    for finished in (chunk.finished for chunk in chunks if chunk.finished):
        own = [chunk for chunk in chunks if chunk.request_id == finished.request_id]
        assert [entry for chunk in own for entry in chunk.logprobs or ()] == finished.logprobs
        assert all(len(chunk.logprobs or ()) == len(chunk.tokens) for chunk in own)
        assert_measured(tiny_pair, finished, PROMPTS[int(finished.request_id)])
        origins |= set(finished.origins)
    assert len(origins) >= 2


@torch.inference_mode()
def assert_measured(pair, finished, prompt, also_prompt=False):
    text = [*prompt, *finished.tokens]
    first = 1 if also_prompt else len(prompt)
    scores = pair.target(torch.tensor([text])).logits[0, first - 1 : -1].log_softmax(dim=-1)
    assert (finished.prompt_logprobs is not None) == also_prompt
    entries = [*(finished.prompt_logprobs or ()), *finished.logprobs]
    assert [entry.token for entry in entries] == text[first:]
    for row, entry in zip(scores, entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        best = row.topk(3)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(float(row[t]), abs=1e-4) for t, value in entry.top)


SHORT, LONG = tuple(range(5, 65)), tuple(range(30, 210))
LIMITS = {
    "alone": Limits(1),
    "in chunks": Limits(3, step_tokens=16),
    "with prefixes in the cache": Limits(3, step_tokens=16, share_prefixes=True),
    "preempted": Limits(3, step_tokens=16, cache_tokens=384),
}


@pytest.mark.parametrize(
    ("drafter", "limits"), [*(("chain", limits) for limits in LIMITS), ("target tree", "preempted")]
)
def test_a_prompts_log_probabilities_are_those_of_one_forward(tiny_pair, drafter, limits):
    engine = Engine(tiny_pair, under(drafter), limits=LIMITS[limits])
    engine.generate([Request("before", SHORT, 2), Request("also before", LONG, 2)])
    plain = Request("plain", LONG, NEW, ignore_eos=True)
    measured = replace(plain, logprobs=3, prompt_logprobs=True)
    asked = [replace(measured, id="short", tokens=SHORT), replace(measured, id="long"), plain]
    found = engine.generate(asked)
    expected = Engine(tiny_pair).generate([replace(asked[0], prompt_logprobs=False), plain])
    assert [g.tokens for g in found] == [expected[n].tokens for n in (0, 1, 1)]
    for request, generation in zip(asked[:2], found[:2], strict=True):
        assert_measured(tiny_pair, generation, request.tokens, also_prompt=True)
        assert generation.cached_tokens == 0
    assert found[2].prompt_logprobs is None
    assert (engine.scheduler.preemptions > 0) == (limits == "preempted")
    [again] = engine.generate([plain])
    assert (again.cached_tokens > 0) == (limits == "with prefixes in the cache")


def test_a_prompt_that_is_measured_takes_no_other_text_from_the_cache(tiny_pair):
    """It enters the slot that holds the same sequence, not the one that was left first. A sequence
    that is like no other takes an empty slot."""
    engine = Engine(tiny_pair, limits=Limits(2, share_prefixes=True))
    first, second = Request("first", SHORT, 2), Request("second", LONG, 2)
    for request in (first, second):
        engine.generate([request])
    for request in (second, first):  # one of them is in the slot that was left first
        measured = replace(request, id="measured", logprobs=0, prompt_logprobs=True)
        [found] = engine.generate([measured])
        assert len(found.prompt_logprobs or ()) == len(request.tokens) - 1
        assert found.cached_tokens == 0
    assert engine.status().prefix_hits == 0
    for request in (first, second):
        [again] = engine.generate([replace(request, id="again")])
        assert again.cached_tokens == len(request.tokens) - 1


@pytest.mark.parametrize("drafter", ["chain", "target tree"])
def test_a_request_for_no_tokens_reads_its_prompt_alone(tiny_pair, drafter):
    engine = Engine(tiny_pair, under(drafter), 3)
    asked = requests(max_new_tokens=0, logprobs=3, prompt_logprobs=True)
    asked.append(replace(asked[0], id="beside", max_new_tokens=NEW))
    *none, some = engine.generate(asked)
    for generation, prompt in zip(none, PROMPTS, strict=True):
        assert (generation.tokens, generation.text) == ([], "")
        assert generation.finish_reason == "length"
        assert_measured(tiny_pair, generation, prompt, also_prompt=True)
    assert_measured(tiny_pair, some, PROMPTS[0], also_prompt=True)


@pytest.fixture(scope="module")
def free(tiny_pair):
    """Without an end."""
    return Engine(tiny_pair, AUTOREGRESSIVE, 3).generate(requests(ignore_eos=True))


@pytest.mark.parametrize("kind", ["stop token", "EOS"])
def test_a_token_that_ends_the_text_is_the_last_one_and_has_no_text(
    tiny_pair, free, monkeypatch, kind
):
    token = free[0].tokens[6]
    asked = requests(stop_tokens=frozenset({token}), ignore_eos=True)
    if kind == "EOS":
        monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", token)
        asked = requests()
    generations = Engine(tiny_pair, under("tree"), 3).generate(asked)
    assert generations[0].finish_reason == "stop"
    for generation, whole in zip(generations, free, strict=True):
        if token in whole.tokens:
            end = whole.tokens.index(token)
            assert generation.tokens == whole.tokens[: end + 1]
            text = tiny_pair.tokenizer.decode(whole.tokens[:end], skip_special_tokens=True)
            assert generation.text == text
        else:
            assert generation.tokens == whole.tokens


def test_no_text_ends_before_its_least_length(tiny_pair, free):
    token = free[0].tokens[6]
    asked = requests(stop_tokens=frozenset({token}), min_tokens=9)
    for generation in Engine(tiny_pair, under("tree"), 3).generate(asked):
        assert len(generation.tokens) >= 9
        assert not {0, token} & set(generation.tokens[:9])


@pytest.mark.parametrize("drafter", ["chain", "tree", "target tree", "hybrid"])
def test_requests_of_one_batch_speculate_as_they_like(tiny_pair, free, drafter):
    limited = zip(requests(ignore_eos=True), (0, 1, None), strict=True)
    asked = [replace(request, speculate=most) for request, most in limited]
    generations = Engine(tiny_pair, under(drafter), 3).generate(asked)
    assert [g.tokens for g in generations] == [g.tokens for g in free]
    none, one, any_number = (max(r.depth for r in g.rounds) for g in generations)
    assert (none, one) == (0, 1)
    assert any_number > 1
    assert sum(r.drafted for r in generations[0].rounds) == 0


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"tokens": ()}, "the prompt is empty"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"tokens": (1,) * 200, "max_new_tokens": 100}, "the context holds 256"),
        ({"tokens": (100_000,)}, "tokens outside"),
        ({"min_tokens": NEW + 1}, "min_tokens must be between 0 and max_new_tokens"),
        ({"logprobs": -1}, "logprobs must be between 0"),
        ({"prompt_logprobs": True}, "prompt_logprobs needs logprobs"),
        ({"stop": ("x", "")}, "stop: a stop string is empty"),
        ({"written": ((5, TokenOrigin.DRAFT),) * (NEW + 1)}, "tokens are written already, more th"),
        ({"written": ((10_000, TokenOrigin.DRAFT),)}, "tokens outside 0"),
        ({"speculate": -1}, "speculate must be at least 0"),
        ({"stop_tokens": frozenset({10_000})}, "stop_tokens: 10000 is no token"),
        ({"sampling": Sampling(logit_bias={10_000: 1})}, "logit_bias: 10000 is no token"),
        ({"stop_tokens": frozenset(range(320)), "min_tokens": 1}, "every token would end the text"),
    ],
)
def test_what_cannot_be_met_is_refused(tiny_pair, options, wrong):
    engine = Engine(tiny_pair)
    with pytest.raises(UserError, match=wrong):
        engine.add(replace(requests()[0], **options))
    assert engine.idle


CHAIN, WARM = configured(chain(max_tokens=2)), Sampling(temperature=1.0)
FIXED = {"greedy": Sampling(), "gumbel": Sampling(temperature=0.9, top_k=40, coupling="gumbel")}


def begun(engine, request, rounds):
    """The chunks of a request's first rounds."""
    engine.add(request)
    chunks = [chunk for _ in range(rounds) for chunk in engine.step()]
    engine.cancel(request.id)
    return chunks


def behind(request, chunks):
    written = [pair for c in chunks for pair in zip(c.tokens, c.origins, strict=True)]
    return replace(request, written=tuple(written))


@pytest.mark.parametrize("rule", FIXED)
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_fixed_text_goes_on_as_it_would_have(tiny_pair, rule, rounds):
    request = Request("r", tuple(range(5, 40)), 24, FIXED[rule], seed=3, ignore_eos=True)
    [whole] = Engine(tiny_pair, CHAIN).generate([request])
    first = begun(Engine(tiny_pair, CHAIN), request, rounds)
    other = Engine(tiny_pair, CHAIN, limits=Limits(2, share_prefixes=True))
    chunks = list(other.stream(behind(request, first)))
    assert chunks[-1].finished is not None
    assert chunks[-1].finished.tokens == whole.tokens
    assert chunks[-1].finished.text == whole.text
    assert len(chunks[-1].finished.origins) == 24
    new = [token for chunk in chunks for token in chunk.tokens]
    assert new == whole.tokens[24 - len(new) :]
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_no_more_of_a_resumed_request_is_cached_than_its_prompt(tiny_pair):
    request = Request("r", SHORT, NEW, ignore_eos=True)
    engine = Engine(tiny_pair, CHAIN, limits=Limits(2, share_prefixes=True))
    first = begun(engine, request, 4)
    [found] = engine.generate([behind(request, first)])
    assert found.cached_tokens == found.prompt_tokens == len(SHORT)
    assert engine.prefixes.tokens > len(SHORT)


def test_a_stop_string_over_the_border_ends_the_text(tiny_pair):
    request = Request("r", tuple(range(5, 40)), 24, ignore_eos=True)
    chunks = list(Engine(tiny_pair, CHAIN).stream(request))
    before, after = chunks[1].text, chunks[2].text
    stopped = replace(request, stop=(before[-1] + after[0],))
    [whole] = Engine(tiny_pair, CHAIN).generate([stopped])
    first = begun(Engine(tiny_pair, CHAIN), stopped, 2)
    [found] = Engine(tiny_pair, CHAIN).generate([behind(stopped, first)])
    assert (found.text, found.finish_reason) == (whole.text, "stop")
    assert found.tokens == whole.tokens


@pytest.fixture
def drawn(monkeypatch):
    """The uniform numbers that each request draws, in the order of entering."""
    streams: list[set[float]] = []

    def noted(*arguments):
        stream, numbers = RandomStream(*arguments), set()
        uniform = stream.uniform

        def draw():
            numbers.add(number := uniform())
            return number

        stream.uniform = draw
        streams.append(numbers)
        return stream

    monkeypatch.setattr("specdec_core.engine.engine.RandomStream", noted)
    return streams


def test_a_sampled_continuation_draws_other_numbers(tiny_pair, drawn):
    """The tokens that it continues depend on the first engine's numbers."""
    sampled = CHAIN.model_copy(update={"sampling": WARM})
    request = Request("r", tuple(range(5, 40)), 24, seed=3, ignore_eos=True)
    first = begun(Engine(tiny_pair, sampled), request, 4)
    Engine(tiny_pair, sampled).generate([behind(request, first)])
    before, after = drawn
    assert min(len(before), len(after)) > 4
    assert not before & after


REMEMBERING = {
    "suffix": ({"kind": "suffix", "memory": "all"}, True),
    "own suffix": ({"kind": "suffix"}, False),
    "lasting": (chain("heuristic", transient=False), True),
    "transient": (chain("heuristic"), False),
    "table": (chain("pre_cut", target_cost=2), True),
    "kept table": (chain("pre_cut", target_cost=2, updates=False, exploration=0), False),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", REMEMBERING)
def test_a_seed_draws_other_numbers_where_a_drafter_has_learned(tiny_pair, drawn, name, again):
    """The numbers that drew an output judge no candidate that depends on it, whether or not the
    engine is configured again with that drafter. Where a drafter remembers nothing of earlier
    requests, a seed has one output."""
    drafter, remembers = REMEMBERING[name]
    configuration = configured(drafter, WARM)
    engine, request = Engine(tiny_pair, configuration), Request("r", (5, 6, 7), 24, seed=3)
    (first,) = engine.generate([request])
    if again:
        kept = engine.drafter
        engine.configure(configured({"kind": "prompt_lookup"}, WARM))
        engine.configure(configuration, kept)
    (second,) = engine.generate([request])
    before, after = drawn
    assert min(len(before), len(after)) > 4
    assert bool(before & after) == (first.tokens == second.tokens) == (not remembers)


CONTINUED = 12


def asked_turns(pair, *prompts):
    return rendered(prompts, pair.tokenizer, "auto", "set")


def test_every_turn_comes_after_the_targets_greedy_answers(chat_pair):
    tokenizer = chat_pair.tokenizer
    turns = Prompt("7", "Why?", None, ("Why?", "And?", "So?"))
    prompts = asked_turns(chat_pair, Prompt("0", "x = 1"), turns)
    requests = requests_of(prompts, chat_pair, CONTINUED, first=5)
    assert [request.id for request in requests] == ["0", "7", "7, turn 2", "7, turn 3"]
    assert [request.seed for request in requests] == [5, 6, 7, 8]
    assert requests[0].tokens == tuple(tokenizer("x = 1")["input_ids"])

    history = "<|endoftext|>[user]Why?\n[assistant]"
    for request, question in zip(requests[1:], ("And?", "So?", None), strict=True):
        assert list(request.tokens) == tokenizer(history, add_special_tokens=False)["input_ids"]
        (answer,) = Engine(chat_pair).generate([request])
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        history += f"{text}\n[user]{question}\n[assistant]"


def test_answers_to_several_conversations_are_decoded_together_where_that_is_asked(
    chat_pair, monkeypatch
):
    conversations = [Prompt("7", "Why?", None, ("Why?", "And?", "So?")), Prompt("8", "x = 1")]
    conversations.append(Prompt("9", "Who?", None, ("Who?", "When?")))
    prompts, decoded = asked_turns(chat_pair, *conversations), []
    generate = Engine.generate

    def counted(engine, requests, *rest, **options):
        decoded.append(len(requests))
        return generate(engine, requests, *rest, **options)

    monkeypatch.setattr(Engine, "generate", counted)
    alone = requests_of(prompts, chat_pair, CONTINUED, first=5)
    assert decoded == [1, 1, 1]
    assert requests_of(prompts, chat_pair, CONTINUED, first=5, together=True) == alone
    assert decoded[3:] == [2, 1]
    assert [request.id for request in alone] == [
        "7",
        "7, turn 2",
        "7, turn 3",
        "8",
        "9",
        "9, turn 2",
    ]


def test_how_the_engine_decodes_does_not_change_what_is_asked(chat_pair):
    prompts = asked_turns(chat_pair, Prompt("7", "Why?", None, ("Why?", "And?")))
    sampled = Configuration(sampling=Sampling(temperature=1))
    engine = Engine(chat_pair, sampled, slots=4)
    asked = requests_of(prompts, chat_pair, CONTINUED)
    assert requests_of(prompts, chat_pair, CONTINUED, engine=engine) == asked
    assert engine.configuration == sampled


def test_plain_prompts_open_no_engine(tiny_pair, monkeypatch):
    monkeypatch.setattr("specdec_core.engine.turns.Engine", None)
    turns = Prompt("7", "Why?", None, ("Why?", "So?"))
    found = requests_of(asked_turns(tiny_pair, Prompt("0", "def f("), turns), tiny_pair, CONTINUED)
    tokens = [tuple(tiny_pair.tokenizer(text)["input_ids"]) for text in ("def f(", "Why?")]
    plain = zip(("0", "7"), tokens, strict=True)
    assert found == [Request(id, own, CONTINUED, seed=n) for n, (id, own) in enumerate(plain)]


def test_a_conversation_that_may_not_fit_is_refused_before_it_is_asked(chat_pair):
    prompts = asked_turns(chat_pair, Prompt("7", "Why?", None, ("Why?", "And?")))
    message = r"prompt 7: \d+ tokens and 2 × 120 new ones are more than the 256 that the pair holds"
    with pytest.raises(UserError, match=rf"{message} \(runner\.max_length\)"):
        requests_of(prompts, chat_pair, 120)
    with pytest.raises(UserError, match=r"prompt 0: \d+ tokens and 256 new ones are more than"):
        requests_of(asked_turns(chat_pair, Prompt("0", "x")), chat_pair, 256)
    with pytest.raises(UserError, match="prompt 0: it has no tokens"):
        requests_of([Prompt("0", "", template="")], chat_pair, CONTINUED)
