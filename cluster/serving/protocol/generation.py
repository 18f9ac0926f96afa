"""What requests for completions and for chats have in common."""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from cluster.serving.protocol.errors import ApiError, refusal
from cluster.serving.protocol.fields import (
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    WHOLE,
    Bias,
    LeastTokens,
    ModelName,
    No,
    One,
    Part,
    Penalty,
    Speculation,
    StreamOptions,
    Text,
    TokenId,
    Unit,
    Yes,
    needs,
)
from cluster.serving.protocol.formats import ResponseFormat
from specdec_core.config import Sampling, Temperature
from specdec_core.tokens.grammar import Grammar

Body = TypeVar("Body", bound=BaseModel)

STREAM_RULE = needs("stream_options", [{"type": "object"}], "stream")
_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def parse_body(model: type[Body], body: bytes) -> Body:
    """Validate a request's body. Raises :class:`ApiError` (400) with the offending key as
    `param`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error, model, body) from None


class GenerationRequest(Part):
    """A key left out or null takes the server's default."""

    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        default=None, description=f"an integer from 1 to {MAX_CHOICES}: choices of each prompt"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # How tokens are drawn.
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Bias | None = Field(
        default=None, description="token ids as strings, with numbers from -100 to 100"
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    # Where the text ends.
    stop: (
        Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None
    ) = Field(
        default=None,
        description=f"a string, or at most {MAX_STOP_STRINGS} of them, none of them empty",
    )
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None
    ) = None
    min_tokens: LeastTokens | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    # What is done, and what is answered.
    speculative: Speculation | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    # Clients send the neutral values of these.
    best_of: One | None = Field(default=None, description="1; more is not supported")
    use_beam_search: No | None = Field(default=None, description="false; true is not supported")
    length_penalty: Unit | None = Field(default=None, description="1; others are not supported")
    skip_special_tokens: Yes | None = Field(
        default=None, description="true; false is not supported"
    )
    spaces_between_special_tokens: Yes | None = Field(
        default=None, description="true; false is not supported"
    )
    include_stop_str_in_output: No | None = Field(
        default=None, description="false; true is not supported"
    )

    @field_validator("stream_options")
    @classmethod
    def _only_streaming(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("needs stream: true")
        return value

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """See :func:`parse_body`."""
        return parse_body(cls, body)

    @property
    def choices(self) -> int:
        """Of each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """What the text must be, and the field that says so."""
        grammar = self.response_format.grammar if self.response_format else None
        return None if grammar is None else ("response_format", grammar)

    @property
    def traced(self) -> bool:
        """Whether the rounds are to be told."""
        return bool(self.stream_options and self.stream_options.include_rounds)

    @property
    def most_tokens(self) -> int | None:
        """New tokens of each choice that were asked for."""
        raise NotImplementedError

    @property
    def tops(self) -> int | None:
        """Most likely tokens to tell with each token; None: nothing of its probability."""
        raise NotImplementedError

    @property
    def measures_prompt(self) -> bool:
        """Whether to tell the same of the prompt's tokens."""
        return False

    def sampling(self, default: Sampling, vocab_size: int) -> Sampling:
        """The configuration's sampling, with what this request asks for. Raises
        :class:`ApiError`."""
        given: dict[str, Any] = {key: getattr(self, key) for key in _SAMPLING}
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        if self.logit_bias is not None:
            bias = {int(token): value for token, value in self.logit_bias.items()}
            check_tokens(bias, vocab_size, "logit_bias")
            given["logit_bias"] = tuple(sorted(bias.items()))
        return default.model_copy(update={k: v for k, v in given.items() if v is not None})


def check_tokens(tokens: Any, vocab_size: int, param: str) -> None:
    """Raises :class:`ApiError` for tokens outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ApiError(
                f"{param}: token {token} is outside 0…{vocab_size - 1}",
                param=param,
                code="unknown_token",
            )
