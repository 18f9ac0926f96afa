"""A stream that is asked for its rounds tells where each token came from."""

from __future__ import annotations

from typing import Any

import openai
import pytest

ROUNDS = {"include_rounds": True}
OPTIONS: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 40}


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_rounds_have_the_texts_tokens_and_their_candidates(
    client: openai.OpenAI, drawn: dict[str, Any]
) -> None:
    options = {**OPTIONS, "prompt": "def main(", **drawn}
    *parts, last = client.completions.create(**options, stream_options=ROUNDS)
    parts.append(last)
    rounds = [part.round for part in parts]
    tokens = [token for told in rounds for token in told["tokens"]]
    assert "".join(t["text"] for t in tokens) == "".join(p.choices[0].text for p in parts)
    counts = last.specdec
    assert len(rounds) == counts["rounds"]
    for key in ("drafted", "accepted"):
        assert sum(told[key] for told in rounds) == counts[key] > 0
    assert all(len(told["candidates"]) == told["drafted"] for told in rounds)
    assert all(0 < t["probability"] <= 1 for t in tokens)
    # Greedy drafts need no distributions.
    known = [t["drafted"] is not None for t in tokens if t["origin"] == "draft"]
    assert all(known) if drawn["temperature"] else not any(known)
    assert all(told["milliseconds"] > 0 for told in rounds)


def test_a_chat_without_speculation_has_rounds_of_one_token(client: openai.OpenAI) -> None:
    parts = client.chat.completions.create(
        **OPTIONS,
        messages=[{"role": "user", "content": "hi"}],
        stream_options=ROUNDS,
        extra_body={"speculative": {"enabled": False}},
    )
    rounds = [part.round for part in parts if hasattr(part, "round")]
    assert {(len(told["tokens"]), told["drafted"]) for told in rounds} == {(1, 0)}


def test_other_streams_have_none(client: openai.OpenAI) -> None:
    parts = client.completions.create(**OPTIONS, prompt="def main(")
    assert not any(hasattr(part, "round") for part in parts)
