"""OpenAI's `/v1/completions` as of openai 3.52, with fields of vLLM's.

Answers have an additional object `specdec`, the counts of speculative decoding. Unsupported fields are refused by name; labels such as `user` change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from cluster.serving.protocol.counts import optional
from cluster.serving.protocol.fields import Count, Text, TokenIds, Tops, neutral
from cluster.serving.protocol.generation import GenerationAnswer, GenerationRequest
from cluster.serving.protocol.logprobs import CompletionLogprobs

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
