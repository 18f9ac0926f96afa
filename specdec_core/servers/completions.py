"""A running server that completes prompts, over OpenAI's protocol.

Prompts are sent as token ids. The answer's token ids are taken from the server where it gives them:
vLLM and this project's server do with `return_token_ids`, llama.cpp's server by its own route
`/completion`. Otherwise the answer's text is tokenised with the target's tokenizer, which must give
the same text back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from time import sleep
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec_core.base.errors import UserError
from specdec_core.prompts.chat import end_of_turn
from specdec_core.servers import hidden_states

KEY = "OPENAI_API_KEY"  # the variable that clients of OpenAI's protocol read
# Metrics of vLLM, llama.cpp and this project's server, after the prefix with the server's name.
CANDIDATES = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
SILENCE = 600.0  # seconds without a byte after which a request has failed
# Statuses of a request with a field that the server does not know.
_UNKNOWN = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)
_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
_TRIES = 6  # of a request to a busy server, each after twice the time of the one before
_LOST = "\N{REPLACEMENT CHARACTER}"
TOPS = 20  # the most likely tokens that a server names: the most by default, vLLM's and ours
_TOKEN_ID = "token_id:"
# Greedy decoding, whatever the server's defaults are.
_GREEDY = {"temperature": 0, "presence_penalty": 0, "frequency_penalty": 0}
# Drawing from the model's own distribution.
SAMPLED: dict[str, Any] = {"temperature": 1, "top_p": 1}
# Fields that OpenAI's protocol does not have.
_MORE: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "top_k": -1,
    "min_p": 0,
    "return_token_ids": True,
}


# llama.cpp's route, and its fields: its samplers and its cache of prompts are left out.
_LLAMA_CPP = "/completion"
_LLAMA_CPP_FIELDS: dict[str, Any] = {
    "return_tokens": True,
    "cache_prompt": False,
    "repeat_penalty": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0,
}


class NoAnswer(UserError):
    """A server does not answer a request, not even with a refusal."""


class AnswerServer:
    """The model of a server at `url`. With several models, `model` chooses one.

    `tokenizer` and `eos_token_ids` are the target's. Requests may be sent from several threads.

    Raises:
        UserError: nothing answers at the URL, it has no model of that name, or the key in
            :data:`KEY` cannot be sent.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Collection[int],
        model: str | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.tokenizer, self._ends = tokenizer, frozenset(eos_token_ids)
        self._end_of_turn = end_of_turn(tokenizer)
        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{KEY}: a key holds printable ASCII characters only")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                timeout=SILENCE,
                limits=httpx.Limits(max_connections=None),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise UserError(f"{self.url}: no URL of a server: {error}") from None
        self.model = self._chosen(model)
        choice = self._probe(_MORE)
        self._more = _MORE if choice is not None else {}
        gives_tokens = choice is not None and choice.get("token_ids") is not None
        self._llama_cpp = not gives_tokens and self._is_llama_cpp()

    def complete(self, prompt: Sequence[int], max_new_tokens: int, **fields: Any) -> list[int]:
        """The answer, up to and with its first end token: greedy, unless `fields` of the request
        say otherwise.

        Raises:
            UserError: the server refuses the request, or its answer is no completion.
        """
        if self._llama_cpp:
            answer = self._send("POST", _LLAMA_CPP, self._own(prompt, max_new_tokens) | fields)
            tokens = self._json(answer).get("tokens") or []
        else:
            body = {**self._body(prompt, max_new_tokens), **self._more, **fields}
            choice = self._completed(self._send("POST", "/v1/completions", body), prompt)
            tokens = choice.get("token_ids")
            if tokens is None:
                tokens = self._tokenised(list(prompt), choice)[:max_new_tokens]
        return self._ended(tokens)

    def complete_with_features(
        self, prompt: Sequence[int], max_new_tokens: int
    ) -> tuple[list[int], Tensor]:
        """The greedy answer, as above, and the target's features of the prompt and the answer, but
        its last token (n, layers · width); of a server that writes them (:mod:`.hidden_states`).

        Raises:
            UserError: the server refuses the request, its answer is no completion, or its features
                cannot be read here.
        """
        body = {**self._body(prompt, max_new_tokens), **self._more, **hidden_states.ASKED}
        answer = self._send("POST", "/v1/completions", body)
        known = answer.status_code not in _UNKNOWN
        content = self._json(answer) if known else {}
        if (path := hidden_states.written(content)) is None:
            reason = "" if known else f" ({refusal(answer.text)})"
            raise UserError(
                f"{self.url}: writes no hidden states, which an EAGLE head reads{reason}; vLLM"
                " does, if it is started as the manual's page Record and replay says"
            )
        tokens = self._ended(self._choice(content).get("token_ids") or [])
        return tokens, hidden_states.taken(path, [*prompt, *tokens[:-1]])

    def _ended(self, tokens: Sequence[int]) -> list[int]:
        """An answer up to and with its first end token. Raises :class:`UserError` for an empty
        one."""
        end = next((n for n, token in enumerate(tokens, 1) if token in self._ends), len(tokens))
        if not end:
            raise UserError(f"{self.url}: an answer without a token")
        return list(tokens[:end])

    def logprobs(self, tokens: Sequence[int]) -> list[dict[int, float]]:
        """For each token after the first, the log-probabilities that the model gave in its place:
        of the most likely tokens, :data:`TOPS` at most, and of the token itself. The model's own
        log-probabilities are meant, before sampling changes them.

        Raises:
            UserError: the server refuses the request, or gives no such log-probabilities.
        """
        fields = {"echo": True, "logprobs": TOPS, "return_tokens_as_token_ids": True}
        body = {**self._body(tokens, 0), **fields}
        choice = self._completed(self._send("POST", "/v1/completions", body), tokens)
        try:
            tops = choice["logprobs"]["top_logprobs"][1 : len(tokens)]
            found = [
                {int(name.removeprefix(_TOKEN_ID)): float(p) for name, p in top.items()}
                for top in tops
            ]
        except (KeyError, TypeError, ValueError, AttributeError):
            found = []
        if len(found) != len(tokens) - 1:
            raise UserError(
                f"{self.url}: does not give the log-probabilities of a prompt's tokens by their ids"
            )
        return found

    @property
    def version(self) -> str:
        """What the server says of its version; empty where it says nothing."""
        answer = self._send("GET", "/version")
        with suppress(ValueError, KeyError, TypeError):
            return str(answer.json()["version"])
        return ""

    @property
    def candidates(self) -> float | None:
        """The candidate tokens that it has drafted so far, by its metrics; None where these do not
        say."""
        answer, found = self._send("GET", "/metrics"), None
        if answer.status_code != httpx.codes.OK:
            return None
        with suppress(ValueError):
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    server, _, name = sample.name.partition(":")
                    if name == CANDIDATES:
                        found = (found or 0.0) + sample.value
                    elif server == "vllm":  # which counts candidates only where it speculates
                        found = found or 0.0
        return found

    def close(self) -> None:
        self._http.close()

    def _chosen(self, model: str | None) -> str:
        answer = self._json(self._send("GET", "/v1/models"))
        try:
            names = [str(each["id"]) for each in answer["data"]]
        except (KeyError, TypeError):
            names = []
        if not names:
            raise UserError(f"{self.url}: its /v1/models names no model")
        if model is None and len(names) == 1:
            return names[0]
        if model not in names:
            asked = "--server-model chooses one" if model is None else f"no model {model!r}"
            raise UserError(f"{self.url}: {asked} (it has: {', '.join(names)})")
        return model

    def _probe(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        """An answer to a request with fields beside OpenAI's; None where the server does not take
        them."""
        body = self._body(self.least, 1) | fields
        answer = self._send("POST", "/v1/completions", body)
        return None if answer.status_code in _UNKNOWN else self._completed(answer, self.least)

    def _is_llama_cpp(self) -> bool:
        """Whether the server has llama.cpp's route, with token ids in its answer."""
        answer = self._send("POST", _LLAMA_CPP, self._own(self.least, 1))
        if answer.status_code != httpx.codes.OK:
            return False
        with suppress(ValueError, KeyError, TypeError):
            return isinstance(answer.json()["tokens"], list)
        return False

    @property
    def least(self) -> list[int]:
        """The shortest prompt."""
        return [next(iter(self._ends), 0)]

    def _own(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """The body for llama.cpp's route."""
        size = {"prompt": list(prompt), "n_predict": max_new_tokens}
        return {"model": self.model, **size, **_GREEDY, **_LLAMA_CPP_FIELDS}

    def _body(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        size = {"prompt": list(prompt), "max_tokens": max_new_tokens}
        return {"model": self.model, **size, **_GREEDY}

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """An answer. Requests to a busy server are repeated."""
        for number in range(_TRIES):
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.HTTPError as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise NoAnswer(f"{self.url}: does not answer: {reason}") from None
            if answer.status_code not in _BUSY:
                break
            sleep(2**number / 10)
        return answer

    def _json(self, answer: httpx.Response) -> dict[str, Any]:
        if answer.status_code != httpx.codes.OK:
            raise UserError(f"{self.url}: status {answer.status_code}: {refusal(answer.text)}")
        with suppress(ValueError):
            content = answer.json()
            if isinstance(content, dict):
                return content
        raise UserError(f"{self.url}: answers something else than a JSON object")

    def _completed(self, answer: httpx.Response, prompt: Sequence[int]) -> dict[str, Any]:
        """The choice of an answer. The hidden states that were written beside it are removed."""
        content = self._json(answer)
        choice = self._choice(content)
        if (path := hidden_states.written(content)) is not None:
            with suppress(UserError):  # also where it cannot be read here
                hidden_states.taken(path, prompt)
        return choice

    def _choice(self, content: dict[str, Any]) -> dict[str, Any]:
        try:
            [choice] = content["choices"]
            assert isinstance(choice["text"], str)
        except (KeyError, TypeError, ValueError, AssertionError):
            raise UserError(f"{self.url}: its answer is no completion") from None
        return dict(choice)

    def _tokenised(self, prompt: list[int], choice: dict[str, Any]) -> list[int]:
        """The tokens of an answer's text, by the target's tokenizer."""
        text, before = choice["text"], self._text(prompt)
        if choice.get("finish_reason") == "length":  # its last token may end inside a character
            text = text.rstrip(_LOST)
        whole = self.tokenizer(before + text, add_special_tokens=False)["input_ids"]
        tokens = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # Bytes that are no text are lost in it.
        if _LOST in text or self._text([*prompt, *tokens]) != before + text:
            raise UserError(
                f"{self.url}: gives no token ids, and the target's tokenizer does not give the"
                f" same text back: {text[:60]!r}"
            )
        if choice.get("finish_reason") == "stop" and not self._ends.intersection(tokens):
            tokens = [*tokens, *self._end_after(prompt)]
        return list(tokens)

    def _end_after(self, prompt: list[int]) -> list[int]:
        """The end token that a server leaves out of an answer's text; none if none is known. A
        prompt with an end of turn in it is a chat: its answer ends with the same token."""
        chat = self._end_of_turn.intersection(prompt)
        candidates = [*chat, self.tokenizer.eos_token_id, *sorted(self._ends)]
        return [token for token in candidates if token in self._ends][:1]

    def _text(self, tokens: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def refusal(text: str) -> str:
    """The message of an error in OpenAI's form; any other text as it begins."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]
