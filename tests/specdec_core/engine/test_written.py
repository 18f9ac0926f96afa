"""Sequences that are continued: by another engine, and by a conversation's next turn."""

from dataclasses import replace

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.engine.turns import requests_of
from specdec_core.prompts.chat import rendered
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.tokens.sampling import RandomStream
from tests.specdec_core.kinds import chain, configured

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
    assert len(chunks[-1].finished.origins) == len(chunks[-1].finished.token_seconds) == 24
    new = [token for chunk in chunks for token in chunk.tokens]
    assert new == whole.tokens[24 - len(new) :]
    assert "".join(chunk.text for chunk in chunks) == whole.text


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


@pytest.mark.parametrize("memory", ["all", "request"])
def test_a_seed_draws_other_numbers_where_earlier_outputs_are_proposed(tiny_pair, drawn, memory):
    """The numbers that drew an output do not judge it as a candidate. Where a drafter remembers
    nothing of earlier requests, a seed has one output."""
    configuration = configured({"kind": "suffix", "memory": memory}, WARM)
    engine, request = Engine(tiny_pair, configuration), Request("r", (5, 6, 7), 24, seed=3)
    first, second = (engine.generate([request])[0].tokens for _ in range(2))
    before, after = drawn
    assert min(len(before), len(after)) > 4
    assert bool(before & after) == (first == second) == (memory == "request")


NEW = 12


def asked_turns(pair, *prompts):
    return rendered(prompts, pair.tokenizer, "auto", "set")


def test_every_turn_comes_after_the_targets_greedy_answers(chat_pair):
    tokenizer = chat_pair.tokenizer
    prompts = asked_turns(
        chat_pair, Prompt("0", "x = 1"), Prompt("7", "Why?", None, ("Why?", "And?", "So?"))
    )
    requests = requests_of(prompts, chat_pair, NEW, first=5)
    assert [request.id for request in requests] == ["0", "7", "7, turn 2", "7, turn 3"]
    assert [request.seed for request in requests] == [5, 6, 7, 8]
    assert requests[0].tokens == tuple(tokenizer("x = 1")["input_ids"])

    history = "<|endoftext|>[user]Why?\n[assistant]"
    for request, question in zip(requests[1:], ("And?", "So?", None), strict=True):
        assert list(request.tokens) == tokenizer(history, add_special_tokens=False)["input_ids"]
        (answer,) = Engine(chat_pair).generate([request])
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        history += f"{text}\n[user]{question}\n[assistant]"


def test_how_the_engine_decodes_does_not_change_what_is_asked(chat_pair):
    prompts = asked_turns(chat_pair, Prompt("7", "Why?", None, ("Why?", "And?")))
    sampled = Configuration(sampling=Sampling(temperature=1))
    engine = Engine(chat_pair, sampled, slots=4)
    assert requests_of(prompts, chat_pair, NEW, engine=engine) == requests_of(
        prompts, chat_pair, NEW
    )
    assert engine.configuration == sampled


def test_plain_prompts_open_no_engine(tiny_pair, monkeypatch):
    monkeypatch.setattr("specdec_core.engine.turns.Engine", None)
    prompts = asked_turns(
        tiny_pair, Prompt("0", "def main("), Prompt("7", "Why?", None, ("Why?", "So?"))
    )
    tokens = [tuple(tiny_pair.tokenizer(text)["input_ids"]) for text in ("def main(", "Why?")]
    assert requests_of(prompts, tiny_pair, NEW) == [
        Request("0", tokens[0], NEW, seed=0),
        Request("7", tokens[1], NEW, seed=1),
    ]


def test_a_conversation_that_may_not_fit_is_refused_before_it_is_asked(chat_pair):
    prompts = asked_turns(chat_pair, Prompt("7", "Why?", None, ("Why?", "And?")))
    message = (
        r"prompt 7: \d+ tokens and 2 × 120 new ones are more than the 256 that the pair holds"
        r" \(runner\.max_length\)"
    )
    with pytest.raises(UserError, match=message):
        requests_of(prompts, chat_pair, 120)
    with pytest.raises(UserError, match=r"prompt 0: \d+ tokens and 256 new ones are more than"):
        requests_of(asked_turns(chat_pair, Prompt("0", "x")), chat_pair, 256)
    with pytest.raises(UserError, match="prompt 0: it has no tokens"):
        requests_of([Prompt("0", "", template="")], chat_pair, NEW)
