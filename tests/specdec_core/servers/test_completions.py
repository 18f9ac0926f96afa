"""What a server's answers become, and its errors, with a scripted server."""

import json
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec_core.base.errors import UserError
from specdec_core.prompts.prompt import Prompt
from specdec_core.recordings.plan import ShardPrompt
from specdec_core.servers.answers import _AHEAD, asking
from specdec_core.servers.completions import KEY, AnswerServer
from tests.commands import wait_until
from tests.conftest import chat_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPT: list[int] = TOKENIZER("def")["input_ids"]


def choice(text="a", reason="length", **more):
    return {"choices": [{"text": text, "finish_reason": reason, **more}]}


def answers(*given):
    """400 to fields beside OpenAI's, then the given choice."""
    return lambda body: (400, {}) if "return_token_ids" in body else (200, choice(*given))


@contextmanager
def scripted(answer):
    class Script(BaseHTTPRequestHandler):
        def do_GET(self):
            self._give(200, {"data": [{"id": "tiny"}]})

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._give(*answer(json.loads(body)))

        def _give(self, status, content):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            with suppress(ConnectionError):  # the client of an interrupted recording is gone
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("key", "url", "message"),
    [
        ("sk-secret\n", "http://user:sk-secret@127.0.0.1:9", "does not answer"),
        ("sk-sec\nret", "http://127.0.0.1:9", f"{KEY}: a key holds printable ASCII"),
        ("sk-secrét", "http://127.0.0.1:9", f"{KEY}: a key holds printable ASCII"),
        ("sk-secret", "http://user:sk-secret@h:abc", "no URL of a server: Invalid port"),
    ],
)
def test_no_error_shows_a_key_or_a_password(monkeypatch, key, url, message):
    monkeypatch.setenv(KEY, key)
    with pytest.raises(UserError, match=message) as refused:
        AnswerServer(url, TOKENIZER, [0])
    assert "sec" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [[], "text", None, {}, {"choices": [7]}])
def test_what_is_no_completion_is_said_in_one_line(content):
    asked = []

    def answer(body):
        asked.append(body)
        return 200, content if len(asked) > 1 else choice(token_ids=[3])

    with scripted(answer) as url:
        server = AnswerServer(url, TOKENIZER, {0})
        for complete in (server.complete, server.complete_with_features):
            with pytest.raises(UserError, match=f"^{url}: [^\n]+$"):
                complete(PROMPT, 2)


def test_llama_cpp_without_tokens_is_said_in_one_line():
    asked = []

    def answer(body):
        asked.append(body)
        if "n_predict" in body:
            return 200, {"tokens": [3]} if len(asked) < 3 else {"content": "a"}
        return 400, {}

    with scripted(answer) as url:
        server = AnswerServer(url, TOKENIZER, {0})
        with pytest.raises(UserError, match="an answer without a token"):
            server.complete(PROMPT, 2)


def test_a_text_that_ends_inside_a_character_lacks_that_character():
    expected = TOKENIZER(" return")["input_ids"]
    with scripted(answers(" return\N{REPLACEMENT CHARACTER}")) as url:
        assert AnswerServer(url, TOKENIZER, [0]).complete(PROMPT, 50) == expected


@pytest.mark.parametrize(("ends", "added"), [({0, 5}, [0]), ({7, 5}, [5]), (set(), [])])
def test_a_stopped_text_ends_with_a_token_that_ends_sequences(ends, added):
    with scripted(answers(" return", "stop")) as url:
        output = AnswerServer(url, TOKENIZER, ends).complete(PROMPT, 50)
    assert output == TOKENIZER(" return")["input_ids"] + added


def test_a_stopped_answer_of_a_chat_ends_with_the_end_of_turn():
    tokenizer = chat_tokenizer("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with scripted(answers(" return", "stop")) as url:
        server = AnswerServer(url, tokenizer, {0, end})
        outputs = [server.complete(prompt, 50) for prompt in (PROMPT, [*PROMPT, end])]
    assert [output[-1] for output in outputs] == [0, end]


def test_only_a_refusal_of_fields_means_that_they_are_unknown():
    statuses = [200, 503]

    def busy_once(body):
        return statuses.pop() if len(statuses) > 1 else 200, choice(token_ids=[5, 6])

    with scripted(busy_once) as url:
        assert AnswerServer(url, TOKENIZER, [0]).complete(PROMPT, 2) == [5, 6]

    def failing(body):
        return 500, {"error": {"message": "no memory"}}

    with scripted(failing) as url, pytest.raises(UserError, match="status 500: no memory"):
        AnswerServer(url, TOKENIZER, [0])


def test_llama_cpp_gives_token_ids_by_its_own_route():
    """Its route of OpenAI's protocol takes all fields, and gives none."""
    asked: list[dict[str, Any]] = []

    def llama_cpp(body):
        asked.append(body)
        return 200, {"tokens": [5, 6, 0][: body["n_predict"]]} if "n_predict" in body else choice()

    with scripted(llama_cpp) as url:
        server = AnswerServer(url, TOKENIZER, [0])
        assert server.complete(PROMPT, 8) == [5, 6, 0]
        assert server.complete(PROMPT, 2, seed=3, temperature=1) == [5, 6]
    greedy, sampled = asked[-2:]
    assert greedy["prompt"] == PROMPT
    assert (greedy["temperature"], sampled["temperature"], sampled["seed"]) == (0, 1, 3)
    assert all(body["return_tokens"] and not body["cache_prompt"] for body in (greedy, sampled))


def test_hidden_states_that_were_not_asked_for_are_removed(tmp_path):
    """vLLM writes them for every request, once it is started so."""
    (states := tmp_path / "states").mkdir()
    (other := tmp_path / "other").touch()

    def writing(body):
        path, prompt = states / "0.safetensors", torch.tensor(body["prompt"])
        content = {"hidden_states": torch.zeros(len(prompt), 1, 2), "token_ids": prompt}
        save_file(content, path)
        path.with_name(f"{path.name}.lock").touch()
        place = path if body["max_tokens"] < 9 else other
        answer = choice(token_ids=[5], logprobs={"top_logprobs": [None, {"token_id:5": -0.5}]})
        return 200, {**answer, "kv_transfer_params": {"hidden_states_path": str(place)}}

    with scripted(writing) as url:
        server = AnswerServer(url, TOKENIZER, [0])
        assert not [*states.iterdir()]  # nor of the requests that find out what it is
        assert server.complete(PROMPT, 1) == [5]
        assert server.logprobs([1, 5]) == [{5: -0.5}]
        assert not [*states.iterdir()]
        assert server.complete(PROMPT, 9) == [5]  # it names another file
    assert other.exists()


def test_prompts_are_sent_only_some_before_the_answers_are_taken():
    asked = []

    def answer(body):
        asked.append(body)
        return 200, choice(token_ids=[5])

    with scripted(answer) as url:
        server, prompt = AnswerServer(url, TOKENIZER, [0]), Prompt(id="p", text="def")
        before, most = len(asked), _AHEAD + 2  # of shards of two prompts, with one client
        turns = [ShardPrompt(range(n, n + 1), prompt, tuple(PROMPT)) for n in range(40)]
        shards = {n: turns[2 * n : 2 * n + 2] for n in range(20)}
        with asking(server, 1, shards, 9) as taken:
            wait_until(lambda: len(asked) - before == most)
            sleep(0.2)
            assert len(asked) - before == most
            for number in shards:
                assert [each.tokens for each in taken(number)] == [[5], [5]]
        assert len(asked) - before == len(turns)
        server.close()


def test_an_interrupt_does_not_wait_for_an_answer_under_way():
    started, end = Event(), Event()

    def slow(body):
        if body["max_tokens"] > 1:
            started.set()
            end.wait(60)
        return 200, choice(token_ids=[5])

    with scripted(slow) as url:
        server, asked = AnswerServer(url, TOKENIZER, [0]), Prompt(id="p", text="def")
        shards = {0: [ShardPrompt(range(1), asked, tuple(PROMPT))]}
        with asking(server, 1, shards, 9):
            assert started.wait(30)
            before = monotonic()
        server.close()
        assert monotonic() - before < 20
        end.set()
