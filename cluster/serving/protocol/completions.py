"""OpenAI's `/v1/completions`, as values: as in the openai client 3.52, with keys of vLLM's.

Answers have two additional objects: `specdec`, the counts of speculative decoding, and vLLM's
`metrics`. Unsupported keys are refused by name; only labels such as `user` change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.serving.protocol.counts import AnswerMetrics, SpecDec, Usage, optional
from cluster.serving.protocol.fields import NewTokensOrNone, Text, TokenIds, Tops, schema_rules
from cluster.serving.protocol.generation import STREAM_RULE, GenerationRequest
from cluster.serving.protocol.logprobs import CompletionLogprobs
from cluster.serving.protocol.rounds import StreamedRound

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompts = Annotated[
    list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra=schema_rules(STREAM_RULE))

    prompt: Text | TokenIds | Prompts = Field(
        union_mode="left_to_right",
        description=f"a string, token ids, or at most {MAX_PROMPTS} of these, none of them empty",
    )
    max_tokens: NewTokensOrNone | None = None
    echo: bool | None = None
    logprobs: Tops | None = None
    add_special_tokens: bool | None = None
    suffix: Literal[""] | None = Field(default=None, description='""; others are not supported')

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


class Completion(BaseModel):
    """An answer, or with a part of the text one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str  # the configuration's id
    choices: list[CompletionChoice]
    usage: Usage | None = None
    specdec: SpecDec | None = optional()
    metrics: AnswerMetrics | None = optional()
    round: StreamedRound | None = optional()
