"""The part of OpenAI's completions protocol that is served, as values.

`/v1/completions` as in the openai client 3.52, with two keys of vLLM's (`top_k`, `ignore_eos`) and
one additional object in the answer: `specdec`, the counts of speculative decoding. Unsupported keys
are refused by name; only `user` is silently ignored.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from typing_extensions import TypeAliasType

from specdec_core.config import (
    Configuration,
    DrafterSettings,
    Sampling,
    Temperature,
    distinct_labels,
    identity,
)
from specdec_core.tokens.statistics import Counts, Generation

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 64
MAX_BODY_BYTES = 8 * 2**20
NOBODY = "nobody"  # drafts, in a range of a schedule


ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]


class ErrorDetails(BaseModel):
    message: str
    type: ErrorType
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetails


class ApiError(Exception):
    """A refused request; becomes an :class:`Error`."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: ErrorType = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = Error(error=ErrorDetails(message=message, type=type, param=param, code=code))


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 1.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Text = Annotated[str, Field(min_length=1)]
One = Annotated[int, Field(ge=1, le=1), WHOLE]
Zero = Annotated[float, Field(ge=0, le=0)]

# Named, so that their schemas can have the limits of the model that is served.
ModelName = TypeAliasType("ModelName", str)
NewTokens = TypeAliasType("NewTokens", Annotated[int, Field(ge=1), WHOLE])
TokenId = TypeAliasType("TokenId", Annotated[int, WHOLE])
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], Field(min_length=1, fail_fast=True)])
Prompts = Annotated[
    list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`. A key left out or null takes the server's default."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={
            "if": {
                "properties": {"stream_options": {"type": "object"}},
                "required": ["stream_options"],
            },
            "then": {"properties": {"stream": {"const": True}}, "required": ["stream"]},
        },
    )

    model: ModelName | None = None
    prompt: Text | TokenIds | Prompts = Field(
        union_mode="left_to_right",
        description=f"a string, token ids, or at most {MAX_PROMPTS} of these, none of them empty",
    )
    max_tokens: NewTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0), WHOLE] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None,
        description=f"a string, or at most {MAX_STOP_STRINGS} of them, none of them empty",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    # Clients send the neutral values of these.
    n: One | None = Field(default=None, description="1; more is not supported")
    best_of: One | None = Field(default=None, description="1; more is not supported")
    logprobs: None = Field(default=None, description="null; others are not supported")
    suffix: Literal[""] | None = Field(default=None, description='""; others are not supported')
    frequency_penalty: Zero | None = Field(default=None, description="0; others are not supported")
    presence_penalty: Zero | None = Field(default=None, description="0; others are not supported")
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        default=None, description="{}; others are not supported"
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if single else prompt

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @field_validator("stream_options")
    @classmethod
    def _only_streaming(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("needs stream: true")
        return value

    @classmethod
    def from_body(cls, body: bytes) -> CompletionRequest:
        """Validate a request body.

        Raises:
            ApiError: 400, with the offending key as `param`.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise refusal(error) from None

    def sampling(self, default: Sampling) -> Sampling:
        """The configuration's sampling, with what this request asks for."""
        given = {key: getattr(self, key) for key in ("temperature", "top_p", "top_k")}
        return default.model_copy(update={k: v for k, v in given.items() if v is not None})


def refusal(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, naming its key."""
    item = error.errors(include_url=False)[0]
    reason = item["msg"].removeprefix("Value error, ")
    if item["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {item['ctx']['error']}")
    if not item["loc"]:
        return ApiError(f"the body: {reason[:1].lower()}{reason[1:]}")
    key = ".".join(str(part) for part in item["loc"])
    param = str(item["loc"][0])
    if item["type"] == "extra_forbidden":
        return ApiError(f"{key}: unknown key", param=param, code="unknown_parameter")
    if item["type"] == "missing":
        return ApiError(f"{key}: required", param=param, code="missing_required_parameter")
    if description := CompletionRequest.model_fields[param].description:
        key, reason = param, f"expected {description}"
    # A prompt of a megabyte should not come back in the error.
    return ApiError(f"{key}: {reason} (got {reprlib.repr(item['input'])})", param=param)


class PromptTokens(BaseModel):
    cached_tokens: int  # which an earlier request's text in the cache began with


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens

    @classmethod
    def of(cls, generations: list[Generation]) -> Usage:
        prompt = sum(g.prompt_tokens for g in generations)
        completion = sum(len(g.tokens) for g in generations)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokens(
                cached_tokens=sum(g.cached_tokens for g in generations)
            ),
        )


class SpecDec(BaseModel):
    """How the tokens came about, summed over the request's prompts (rates as in `Counts`)."""

    configuration: str  # its id
    lossless: bool
    rounds: int  # forwards of the target, N_target
    drafted: int
    accepted: int
    verification_rate: float
    mat: float
    arms: dict[str, int] = {}  # rounds by who drafted, where that changes from round to round

    @classmethod
    def of(cls, generations: list[Generation], configuration: Configuration) -> SpecDec:
        counts = Counts.of(generations)
        metrics = counts.metrics()
        return cls(
            configuration=configuration.id,
            lossless=configuration.lossless,
            rounds=counts.n_target,
            drafted=counts.n_drafted,
            accepted=counts.n_accepted,
            verification_rate=metrics["verification_rate"],
            mat=metrics["mat"],
            arms=_arms(generations, configuration.drafter),
        )


def _arms(generations: list[Generation], drafter: DrafterSettings | None) -> dict[str, int]:
    """Rounds by the label of the arm that drafted, of a drafter that has arms."""
    if drafter is None or drafter.chosen(0) == drafter:
        return {}
    labels = distinct_labels(drafter.parts)
    rounds = Counter(r.arm for generation in generations for r in generation.rounds)
    return {
        NOBODY if arm is None else labels[identity(drafter.chosen(arm))]: count
        for arm, count in rounds.items()
    }


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(BaseModel):
    """An answer, or with a part of the text one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str  # the configuration's id
    choices: list[CompletionChoice]
    usage: Usage | None = None
    specdec: SpecDec | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specdec"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Arm(BaseModel):
    """A bandit's statistics of one of its arms; null where it has none."""

    arm: str
    rounds: int
    share: float
    tokens: float | None  # of a round, on average
    per_millisecond: float | None  # tokens


class Health(BaseModel):
    """Whether requests are answered, and by what."""

    ready: bool
    model: str
    configuration: str  # its id
    label: str
    lossless: bool
    slots: int
    queue: int  # choices that may wait; more requests are refused
    max_length: int
    running: int  # choices that are waiting or being decoded
    waiting: int  # of these, those without a slot
    preemptions: int  # times a choice has made room for an older one in the cache
    prefix_hits: int  # prompts that began like a text in the cache
    prefix_tokens: int  # tokens of them that were not read again
    cancelled: int  # HTTP requests given up by their clients
    arms: list[Arm] = []  # where a bandit with memory of all requests chooses who drafts
