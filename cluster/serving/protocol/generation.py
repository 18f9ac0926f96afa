"""The fields that requests for completions and for chats have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from cluster.serving.protocol.errors import ApiError, conflict
from cluster.serving.protocol.fields import (
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    WHOLE,
    Bias,
    Count,
    No,
    One,
    Part,
    Penalty,
    Speculation,
    StreamOptions,
    Text,
    TokenId,
    TopP,
    Yes,
    neutral,
)
from cluster.serving.protocol.formats import ResponseFormat
from specdec_core.config import Sampling, Temperature
from specdec_core.prompts.prompt import Prompt
from specdec_core.tokens.grammar import Grammar

_SAMPLING = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class GenerationRequest(Part):
    """A field that is missing or null takes the server's default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        default=None, description=f"an integer from 1 to {MAX_CHOICES}: choices of each prompt"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # How tokens are drawn.
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Bias | None = neutral("token ids as strings, with numbers from -100 to 100")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    # Where the output ends.
    stop: (
        Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None
    ) = neutral(f"a string, or at most {MAX_STOP_STRINGS} of them, none of them empty")
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None
    ) = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    # How it is decoded, and what the answer has.
    speculative: Speculation | None = None
    return_token_ids: bool | None = None
    # Fields with neutral values, which clients send.
    best_of: One | None = neutral("1; more is not supported")
    use_beam_search: No | None = neutral("false; true is not supported")
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = neutral(
        "1; others are not supported"
    )
    skip_special_tokens: Yes | None = neutral("true; false is not supported")
    spaces_between_special_tokens: Yes | None = neutral("true; false is not supported")
    include_stop_str_in_output: No | None = neutral("false; true is not supported")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "needs stream: true")
        return self

    @property
    def names(self) -> dict[str, str]:
        """What some fields of a completion are called here."""
        return {}

    @property
    def choices(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """The grammar that the output must follow, and the field that asks for it."""
        grammar = self.response_format.grammar if self.response_format else None
        return None if grammar is None else ("response_format", grammar)

    @property
    def traced(self) -> bool:
        """Whether the stream has the rounds."""
        return bool(self.stream_options and self.stream_options.include_rounds)

    @property
    def most_tokens(self) -> int | None:
        """The most new tokens of each choice, where the request limits them."""
        raise NotImplementedError

    @property
    def tops(self) -> int | None:
        """The most likely tokens to list beside each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def measures_prompt(self) -> bool:
        """Whether the answer has the log-probabilities of the prompt's tokens."""
        return False

    def sampled_prompts(self, tokenizer: Any) -> list[Prompt]:
        """The prompts that a sample of the traffic keeps."""
        raise NotImplementedError

    def sampling(self, default: Sampling, vocab_size: int) -> Sampling:
        """The configuration's sampling, changed as this request asks. Raises :class:`ApiError`."""
        given: dict[str, Any] = {key: getattr(self, key) for key in _SAMPLING}
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        if self.logit_bias is not None:
            bias = {int(token): value for token, value in self.logit_bias.items()}
            check_tokens(bias, vocab_size, "logit_bias")
            given["logit_bias"] = tuple(sorted(bias.items()))
        return default.model_copy(update={k: v for k, v in given.items() if v is not None})


def check_tokens(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises :class:`ApiError` for tokens outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ApiError(
                f"{param}: token {token} is outside 0…{vocab_size - 1}",
                param=param,
                code="unknown_token",
            )
