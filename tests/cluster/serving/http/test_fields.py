"""Every field of a request does what it says, by the openai client."""

import json
import re
from typing import Any

import httpx
import pytest
import torch
from jsonschema import Draft202012Validator

from cluster.serving.protocol.logprobs import TokenTexts
from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.models.location import hub_id
from specdec_core.tokens.statistics import TokenLogprobs
from tests.conftest import tiny_tokenizer
from tests.specdec_core.tokens.test_detokenising import metaspace

PROMPT = "def main("


def ask(client, max_tokens=16, **body):
    """A completion of PROMPT with these fields; whole, and the same from a stream's parts."""
    prompt = body.pop("prompt", PROMPT)
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
    whole = client.completions.create(**asked, extra_body=body)
    texts = [""] * len(whole.choices)
    parts = list(client.completions.create(**asked, extra_body=body, stream=True))
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    assert len({part.id for part in parts}) == 1
    ends = [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason]
    assert len(ends) == len(whole.choices)
    seeded = "temperature" not in body or "seed" in body
    assert not seeded or texts == [choice.text for choice in whole.choices]
    return whole


def tokens_of(client, **body):
    return list(ask(client, return_token_ids=True, **body).choices[0].token_ids)


def test_stop_strings_end_the_text(client):
    text = ask(client, 40).choices[0].text
    stop = next(text[i : i + 2] for i in range(5, len(text)) if "\ufffd" not in text[i : i + 2])
    (choice,) = ask(client, 40, stop=["never!", stop]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_prompts_come_as_text_tokens_or_lists_of_them(client, chat_pair):
    prompts = [PROMPT, "import", "class A:"]
    tokens = [chat_pair.tokenizer(prompt)["input_ids"] for prompt in prompts]

    def texts(prompt, **more):
        choices = ask(client, prompt=prompt, **more).choices
        assert [choice.index for choice in choices] == list(range(len(choices)))
        return [choice.text for choice in choices]

    expected = [texts(prompt)[0] for prompt in prompts]
    assert texts(prompts) == texts(tokens) == expected
    assert texts(tokens[0]) == expected[:1]
    both = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    assert texts(prompts, echo=True) == both


def test_n_choices_are_those_of_as_many_prompts(client):
    drawn = {"temperature": 1.5, "seed": 3}
    answer = ask(client, n=3, **drawn)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3
    many = client.completions.create(
        model="tiny", prompt=[PROMPT] * 3, max_tokens=16, temperature=1.5, seed=3
    )
    assert texts == [choice.text for choice in many.choices]
    fewer = ask(client, n=2, **drawn).choices
    assert [choice.text for choice in fewer] == texts[:2]
    unseeded = [ask(client, n=3, temperature=1.5).choices for _ in range(2)]
    assert len({choice.text for choices in unseeded for choice in choices}) == 6
    assert answer.usage.prompt_tokens * 3 == many.usage.prompt_tokens
    assert answer.usage.completion_tokens == many.usage.completion_tokens
    two = client.completions.create(model="tiny", prompt=["a", "b"], n=2, echo=True, max_tokens=1)
    assert [choice.text[0] for choice in two.choices] == ["a", "a", "b", "b"]


def test_logprobs_are_the_targets(client, chat_pair):
    body = {"logprobs": 2, "return_token_ids": True, "temperature": 1.0, "seed": 5}
    (choice,) = ask(client, **body).choices
    said, ids = choice.logprobs, choice.token_ids
    text = torch.tensor([[*choice.prompt_token_ids, *ids]])
    with torch.inference_mode():
        rows = chat_pair.target(text).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
    assert_told(said, rows, ids)
    for name, own, tops in zip(said.tokens, said.token_logprobs, said.top_logprobs, strict=True):
        assert tops[name] == own


def assert_told(said, rows, ids):
    """The last of what is `said` are the log-probabilities in `rows` of these tokens, and of the
    two likeliest."""
    first = len(said.tokens) - len(ids)
    expected = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
    assert said.token_logprobs[first:] == pytest.approx(expected, abs=1e-4)
    for tops, row in zip(said.top_logprobs[first:], rows, strict=True):
        best = row.topk(2).values.tolist()
        assert sorted(tops.values(), reverse=True)[:2] == pytest.approx(best, abs=1e-4)
    lengths = [len(name) for name in said.tokens]
    assert said.text_offset == [sum(lengths[:place]) for place in range(len(lengths))]


def test_a_streamed_prompt_of_one_token_has_its_entry_too(client):
    asked = {"model": "tiny", "prompt": [5], "max_tokens": 3, "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(**asked).choices
    parts = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
    told = [part.logprobs for part in parts if part.logprobs]
    for name in ("tokens", "token_logprobs", "text_offset"):
        expected = getattr(choice.logprobs, name)
        assert [v for part in told for v in getattr(part, name)] == expected
        assert len(expected) == 4


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_with_logprobs_tells_those_of_the_prompt(client, chat_pair, max_tokens):
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "def main(argv):\n    return len(argv)",
        "max_tokens": max_tokens,
        "echo": True,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    assert client.completions.create(**asked).choices[0].logprobs is None
    asked["logprobs"] = 2  # of a prompt that is in the cache
    answer = client.completions.create(**asked)
    (choice,) = answer.choices
    said, ids = choice.logprobs, [*choice.prompt_token_ids, *choice.token_ids]
    assert answer.usage.completion_tokens == len(choice.token_ids) == max_tokens
    assert choice.text.startswith(asked["prompt"])
    assert (choice.text == asked["prompt"]) == (max_tokens == 0)
    with torch.inference_mode():
        rows = chat_pair.target(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert said.token_logprobs[0] is said.top_logprobs[0] is None
    assert_told(said, rows, ids[1:])
    parts = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    told = [part.logprobs for part in parts if part.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for part in told for v in getattr(part, name)] == getattr(said, name)


def test_logprobs_of_chats_have_bytes(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    said = b"".join(bytes(entry.bytes) for entry in content)
    assert said.decode(errors="replace") == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # it is greedy


def test_tokens_that_are_no_text_are_called_after_their_bytes():
    tokenizer = tiny_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer("é")["input_ids"]
    assert [texts.named(token) for token in ids] == [
        ("bytes:\\xc3", [0xC3]),
        ("bytes:\\xa9", [0xA9]),
    ]
    assert texts.named(tokenizer("x")["input_ids"][0]) == ("x", [0x78])


def test_a_lone_token_keeps_the_space_that_it_begins_with():
    tokenizer = metaspace()
    texts = TokenTexts(tokenizer)
    ids = tokenizer("x def main  (n)", add_special_tokens=False)["input_ids"]
    names = [texts.named(token)[0] for token in ids]
    assert "".join(names) == " x def main  (n)"  # the tokenizer puts one before the text
    assert sum(name.startswith(" ") for name in names) > 2
    for token in ids:
        name, data = texts.named(token)
        assert bytes(data) == name.encode()
    said = texts.completion([TokenLogprobs(token, -1.0, ()) for token in ids], 3)
    lengths = [len(name) for name in names]
    assert said.text_offset == [3 + sum(lengths[:place]) for place in range(len(lengths))]


def test_a_text_ends_at_a_stop_token_also_past_the_end_of_a_text(client):
    tokens = tokens_of(client)
    stop = tokens[5]
    place = tokens.index(stop)
    for ignore_eos in (False, True):
        answer = ask(client, stop_token_ids=[stop], ignore_eos=ignore_eos, return_token_ids=True)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].token_ids == tokens[: place + 1]


def test_no_end_comes_before_min_tokens(client, chat_pair):
    (end,) = chat_pair.eos_token_ids
    likely = {str(end): 100}
    assert tokens_of(client, logit_bias=likely) == [end]
    tokens = tokens_of(client, logit_bias=likely, min_tokens=5)
    assert end not in tokens[:-1]
    assert (len(tokens), tokens[-1]) == (6, end)
    assert tokens_of(client, logit_bias=likely, ignore_eos=True) == [end] * 16


@pytest.mark.parametrize(
    "field",
    [
        {"frequency_penalty": 1.5},
        {"logit_bias": {"70": 3.5, "80": -100}},
        {"temperature": 0.9, "min_p": 0.1, "seed": 4},
    ],
)
def test_the_way_tokens_are_drawn_is_the_engines(client, alone, field):
    given = {key: value for key, value in field.items() if key != "seed"}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    sampling = Sampling(**given)
    request = Request("", alone.encode(PROMPT), 16, sampling, seed=field.get("seed", 0))
    answer = ask(client, **field).choices[0].text
    if sampling.greedy:
        assert answer == alone.generate([request])[0].text
        assert answer != ask(client).choices[0].text
    else:  # the same distribution, from other random numbers
        assert answer == ask(client, **field).choices[0].text
        assert len({ask(client, **{**field, "seed": n}).choices[0].text for n in range(3)}) > 1


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "seed": 2}])
def test_an_answer_has_the_format_that_was_asked_for(client, drawn):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["def", "class"]}, "lines": {"enum": [1, 22]}},
        "required": ["kind", "lines"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "piece", "schema": schema}}
    answer = ask(client, 64, response_format=wanted, **drawn)
    assert answer.choices[0].finish_reason == "stop"
    Draft202012Validator(schema).validate(json.loads(answer.choices[0].text))
    slow = ask(client, 64, response_format=wanted, speculative={"enabled": False}, **drawn)
    if not drawn:
        assert slow.choices == answer.choices
    wanted = {"type": "regex", "regex": "(ab|cd){2,3}x"}
    text = ask(client, response_format=wanted, **drawn).choices[0].text
    assert re.fullmatch(wanted["regex"], text)


def test_neutral_values_change_nothing(client):
    neutral = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "top_k": -1,
        "min_p": 0.0,
        "logit_bias": {},
        "stop": [],
        "stop_token_ids": [],
        "length_penalty": 1.0,
        "best_of": 1,
        "use_beam_search": False,
        "response_format": {"type": "text"},
        "skip_special_tokens": True,
        "logprobs": None,
    }
    assert ask(client, **neutral).choices == ask(client).choices


def test_speculation_is_chosen_for_each_request(client):
    usual = ask(client, 32)
    off = ask(client, 32, speculative={"enabled": False})
    one = ask(client, 32, speculative={"max_tokens": 1})
    assert (off.specdec["drafted"], off.specdec["rounds"]) == (0, 32)
    assert usual.specdec["rounds"] < one.specdec["rounds"] < 32
    assert one.specdec["drafted"] <= one.specdec["rounds"]
    assert usual.choices == off.choices == one.choices


def test_usage_may_come_with_every_part(client):
    *parts, last = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens == 16
    assert parts[0].usage.prompt_tokens == last.usage.prompt_tokens


def test_a_models_card_has_what_clients_of_vllm_read(chat_url):
    (card,) = httpx.get(f"{chat_url}/v1/models").json()["data"]
    # The target model is a folder. Its path is not shown.
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "tiny", 256)


def test_only_a_hubs_id_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert hub_id("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    for name in ("models/mine", str(tmp_path), "bundled:target", "package:x", "gpt2", "a/b#c.gguf"):
        assert hub_id(name) is None
