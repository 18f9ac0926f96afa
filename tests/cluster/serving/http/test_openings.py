"""A choice of a stream is opened once, also where the target begins the trees: a text's first round
then adds nothing to it."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.config import Configuration
from specdec_core.engine import Chunk, Engine
from specdec_core.models.pair import Pair
from tests.cluster.serving.http.events import client_of, events_of
from tests.configurations import BEGUN
from tests.local_server import service_of

BODY = {"max_tokens": 8, "ignore_eos": True, "n": 2, "return_token_ids": True}


async def answered(
    pair: Pair, path: str, body: dict[str, Any], configuration: Configuration = BEGUN
) -> tuple[Any, list[dict[str, Any]]]:
    """The whole answer, and the events of one that is streamed."""
    async with client_of(service_of(Engine(pair, configuration, 2))) as http:
        streamed = await http.post(path, json={**BODY, **body, "stream": True})
        whole = {k: v for k, v in body.items() if k != "stream_options"}
        return (await http.post(path, json={**BODY, **whole})).json(), events_of(streamed)


def parts_of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [part for event in events for part in event["choices"] if part["index"] == index]


async def test_a_completion_repeats_its_prompt_once(chat_pair: Pair) -> None:
    body = {"prompt": "def main(", "echo": True, "logprobs": 1}
    whole, events = await answered(chat_pair, "/v1/completions", body)
    for choice in whole["choices"]:
        parts = parts_of(events, choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "text_offset"):
            told = [value for part in parts for value in part["logprobs"][name]]
            assert told == choice["logprobs"][name]
        assert [part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")] == [
            choice["prompt_token_ids"]
        ]


@pytest.mark.parametrize("traced", [False, True])
async def test_a_chats_choice_has_one_role(chat_pair: Pair, traced: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    body = {**asked, "stream_options": {"include_rounds": traced}}
    whole, events = await answered(chat_pair, "/v1/chat/completions", body)
    for choice in whole["choices"]:
        deltas = [part["delta"] for part in parts_of(events, choice["index"])]
        assert [n for n, delta in enumerate(deltas) if delta.get("role")] == [0]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == choice["message"]["content"]
    if traced:
        rounds = [event for event in events if "round" in event]
        assert len(rounds) == events[-1]["specdec"]["rounds"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def main(", "echo": True, "logprobs": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_lower_choices_open_first(
    chat_pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    step, held = Engine.step, list[Chunk]()

    def late(self: Engine) -> list[Chunk]:
        """Delays the chunks of every first of two steps behind the chunks of the second."""
        chunks = step(self)
        if not held and not self.idle:
            held.extend(chunks)
            return []
        ids = {chunk.request_id for chunk in held}
        others = [chunk for chunk in chunks if chunk.request_id not in ids]
        chunks = [*others, *held, *(chunk for chunk in chunks if chunk.request_id in ids)]
        held.clear()
        return chunks

    monkeypatch.setattr(Engine, "step", late)
    whole, events = await answered(chat_pair, path, {**body, "n": 4}, Configuration())
    came = [part["index"] for event in events for part in event["choices"]]
    assert list(dict.fromkeys(came)) == [0, 1, 2, 3]
    for choice in whole["choices"]:
        tokens = [t for part in parts_of(events, choice["index"]) for t in part["token_ids"]]
        assert tokens == choice["token_ids"]
