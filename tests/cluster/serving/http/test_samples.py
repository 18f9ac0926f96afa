"""A sample of the answered prompts is kept on request, and loads as prompts."""

import asyncio
import logging
import random

import pytest

from cluster.serving.http.routes.completions import CompletionRequest
from cluster.serving.http.samples import PromptSampling, Samples
from specdec_core.engine import Engine
from specdec_core.prompts.prompt import Message, Prompt
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.prompts.shards import keep_within, write_shard
from tests.cluster.serving.http.events import client_of
from tests.local_server import service_of

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "name": "anne", "content": [{"type": "text", "text": "secret"}]},
]

RESULT = [{"role": "tool", "tool_call_id": "c1", "content": "3"}]


async def served(pair, sampling, bodies):
    """The statuses of the answers to these bodies."""
    async with client_of(service_of(Engine(pair)), None, sampling) as http:
        answers = [
            await http.post(f"/v1/{path}", json={"max_tokens": 2, **body}) for path, body in bodies
        ]
    return [answer.status_code for answer in answers]


async def test_answered_prompts_and_chats_are_kept_and_load_as_prompts(chat_pair, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "samples"
    tokens = chat_pair.tokenizer("import", add_special_tokens=False)["input_ids"]
    bodies = [
        ("completions", {"prompt": ["secret a", tokens]}),
        ("completions", {"prompt": "secret b", "stream": True}),
        ("completions", {"prompt": "refused", "max_tokens": -1}),
        ("chat/completions", {"messages": CHAT}),
        ("chat/completions", {"messages": [*RESULT, *CHAT]}),
        ("tokenize", {"prompt": "not answered"}),
    ]
    statuses = await served(chat_pair, PromptSampling(folder, share=1.0), bodies)
    assert statuses == [200, 200, 400, 200, 200, 404]
    found = load_prompts(str(folder))
    assert sorted(prompt.text for prompt in found) == ["import", "secret", "secret a", "secret b"]
    [chat] = (prompt for prompt in found if prompt.messages)
    assert chat.messages == (Message("system", "Be brief."), Message("user", "secret", "anne"))
    [rendered] = (p for p in load_prompts(str(folder), tokenizer=chat_pair.tokenizer) if p.template)
    assert "[system]Be brief.\n[user]secret\n" in rendered.text
    assert "secret" not in caplog.text
    [file] = folder.iterdir()
    assert file.stat().st_mode & 0o077 == folder.stat().st_mode & 0o077 == 0
    assert load_prompts(str(file)) == found


async def test_each_prompt_of_many_requests_at_once_is_written_exactly_once(tmp_path):
    texts = [f"prompt {number}" for number in range(600)]
    bodies = [CompletionRequest(prompt=text) for text in texts]

    random.seed(0)
    drawn = Samples(PromptSampling(tmp_path, share=1.0))
    for body in bodies:
        drawn.offer(body, None)
        if random.random() < 0.1:
            await asyncio.sleep(0)
    await drawn.finish()
    assert sorted(prompt.text for prompt in load_prompts(str(tmp_path))) == sorted(texts)


async def test_nothing_is_kept_unless_asked_for_and_a_share_is_a_share(tiny_pair, tmp_path):
    await served(tiny_pair, None, [("completions", {"prompt": "secret"})])
    assert not list(tmp_path.rglob("*.parquet"))
    drawn = Samples(PromptSampling(tmp_path, share=0.2), seed=0)
    assert sum(drawn.draws() for _ in range(2000)) == pytest.approx(400, abs=60)


def test_the_oldest_files_make_room(tmp_path):
    texts = [f"{number} ".join("abcdefgh") for number in range(6)]
    files = [write_shard(tmp_path, [Prompt(text, text)]) for text in texts]
    assert sorted(files) == files
    size = files[0].stat().st_size
    assert keep_within(tmp_path, 2 * size + size // 2) == files[3::-1]
    assert [prompt.text for prompt in load_prompts(str(tmp_path))] == texts[4:]
