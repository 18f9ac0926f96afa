"""A conversation's turns are asked behind the target's own answers, a plain prompt as ever."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.engine.turns import requests_of
from specdec_core.prompts.chat import rendered
from specdec_core.prompts.prompt_sets import Prompt

NEW = 12


def asked(pair, *prompts):
    return rendered(prompts, pair.tokenizer, "auto", "set")


def test_every_turn_comes_after_the_targets_greedy_answers(chat_pair):
    tokenizer = chat_pair.tokenizer
    prompts = asked(
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
    prompts = asked(chat_pair, Prompt("7", "Why?", None, ("Why?", "And?")))
    sampled = Configuration(sampling=Sampling(temperature=1))
    engine = Engine(chat_pair, sampled, slots=4)
    assert requests_of(prompts, chat_pair, NEW, engine=engine) == requests_of(
        prompts, chat_pair, NEW
    )
    assert engine.configuration == sampled


def test_plain_prompts_open_no_engine(tiny_pair, monkeypatch):
    monkeypatch.setattr("specdec_core.engine.turns.Engine", None)
    prompts = asked(tiny_pair, Prompt("0", "def main("), Prompt("7", "Why?", None, ("Why?", "So?")))
    tokens = [tuple(tiny_pair.tokenizer(text)["input_ids"]) for text in ("def main(", "Why?")]
    assert requests_of(prompts, tiny_pair, NEW) == [
        Request("0", tokens[0], NEW, seed=0),
        Request("7", tokens[1], NEW, seed=1),
    ]


def test_a_conversation_that_may_not_fit_is_refused_before_it_is_asked(chat_pair):
    prompts = asked(chat_pair, Prompt("7", "Why?", None, ("Why?", "And?")))
    message = (
        r"prompt 7: \d+ tokens and 2 × 120 new ones are more than the 256 that the pair holds"
        r" \(runner\.max_length\)"
    )
    with pytest.raises(UserError, match=message):
        requests_of(prompts, chat_pair, 120)
    with pytest.raises(UserError, match=r"prompt 0: \d+ tokens and 256 new ones are more than"):
        requests_of(asked(chat_pair, Prompt("0", "x")), chat_pair, 256)
    with pytest.raises(UserError, match="prompt 0: it has no tokens"):
        requests_of([Prompt("0", "", template="")], chat_pair, NEW)
