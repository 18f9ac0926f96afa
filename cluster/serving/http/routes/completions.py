"""OpenAI's `/v1/completions` as of openai 3.52, with fields of vLLM's.

Answers have an additional object `specdec`, the counts of speculative decoding. Unsupported fields
are refused by name; labels such as `user` change nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from cluster.serving.http.answer import ChoicesAnswer, GenerationAnswer
from cluster.serving.http.choices import choices
from cluster.serving.http.service import Service
from cluster.serving.protocol.fields import Count, Text, TokenIds, Tops, neutral, optional
from cluster.serving.protocol.generation import GenerationRequest, check_tokens
from cluster.serving.protocol.logprobs import CompletionLogprobs
from specdec_core.engine import Chunk, Request
from specdec_core.prompts.prompt import Prompt
from specdec_core.tokens.statistics import Generation, TokenLogprobs

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompts = Annotated[
    list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: Text | TokenIds | Prompts = Field(
        union_mode="left_to_right",
        description=f"a string, token ids, or at most {MAX_PROMPTS} of these, none of them empty",
    )
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Tops | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    add_special_tokens: bool | None = None
    suffix: Literal[""] | None = neutral('""; others are not supported')
    user: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if single else prompt

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def tops(self) -> int | None:
        return self.logprobs

    @property
    def measures_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def sampled_prompts(self, tokenizer: Any) -> list[Prompt]:
        texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in self.prompts]
        return [Prompt(uuid.uuid4().hex, text) for text in texts if text.strip()]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = optional()
    prompt_token_ids: list[int] | None = optional()


class Completion(GenerationAnswer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


def _requests(service: Service, body: CompletionRequest) -> list[Request]:
    most, prompts = service.engine.max_length, []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompts.append(service.prompts.of_text(prompt, most, body.add_special_tokens))
        else:
            check_tokens(prompt, service.engine.vocab_size, "prompt")
            prompts.append(tuple(prompt))
    return choices(service, body, prompts, DEFAULT_MAX_TOKENS)


class CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        super().__init__(service, body, _requests(service, body))
        self._offsets = [0] * len(self.requests)  # of the next token's text

    def choice(self, index: int, generation: Generation) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echoed(index) + generation.text,
            finish_reason=generation.ended,
            logprobs=self._logprobs(index, generation.logprobs, generation.prompt_logprobs),
            token_ids=generation.tokens if self.body.return_token_ids else None,
            prompt_token_ids=self._prompt_tokens(index),
        )

    def opening(
        self, index: int, prompt: Sequence[TokenLogprobs] | None
    ) -> CompletionChoice | None:
        text, tokens = self._echoed(index), self._prompt_tokens(index)
        if not text and tokens is None and prompt is None:
            return None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, None, prompt),
            prompt_token_ids=tokens,
            token_ids=None if tokens is None else [],
        )

    def part(self, index: int, chunk: Chunk) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=chunk.text,
            finish_reason=chunk.finished.ended if chunk.finished else None,
            logprobs=self._logprobs(index, self.asked(chunk)),
            token_ids=chunk.tokens if self.body.return_token_ids else None,
        )

    def whole(self, choices: list[Any], **fields: Any) -> Completion:
        return Completion(choices=choices, **self.common, **fields)

    event = whole

    def _echoed(self, index: int) -> str:
        """The prompt, where the choice's text begins with it."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index // self.body.choices]
        return prompt if isinstance(prompt, str) else str(self.prompts.tokenizer.decode(prompt))

    def _prompt_tokens(self, index: int) -> list[int] | None:
        return list(self.requests[index].tokens) if self.body.return_token_ids else None

    def _logprobs(
        self,
        index: int,
        tokens: Sequence[TokenLogprobs] | None,
        prompt: Sequence[TokenLogprobs] | None = None,
    ) -> CompletionLogprobs | None:
        """The log-probabilities of the whole prompt, if given, and of new tokens."""
        if tokens is None and prompt is None:
            return None
        unknown = None if prompt is None else self.requests[index].tokens[0]
        known = [*(prompt or ()), *(tokens or ())]
        by_id = bool(self.body.return_tokens_as_token_ids)
        logprobs = self.prompts.texts.completion(known, self._offsets[index], unknown, by_id)
        self._offsets[index] += sum(map(len, logprobs.tokens))
        return logprobs
