"""The part of OpenAI's completions protocol that is served, as values.

`/v1/completions` as in the openai client 3.52, with two keys of vLLM's (`top_k`, `ignore_eos`) and
one object of our own in the answer: `specdec`, the counts of speculative decoding. What is not
supported is refused by name; nothing is silently ignored but `user`.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from specdec_core.config import Configuration, Sampling, Temperature
from specdec_core.stats import Counts, Generation

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 64
MAX_BODY_BYTES = 8 * 2**20

# Keys whose neutral values may be sent, because clients do, and nothing else.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None,),
    "suffix": (None, ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
}


class ApiError(Exception):
    """A refused request; becomes OpenAI's error object."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": type, "param": param, "code": code},
        }


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`. A key left out or null takes the server's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    prompt: Any = Field(description="a string, strings, token ids, or lists of token ids")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Any = Field(default=None, description="a string or up to four")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    suffix: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None

    @field_validator(*NEUTRAL)
    @classmethod
    def _supported(cls, value: Any, info: Any) -> Any:
        if value not in NEUTRAL[info.field_name]:
            raise ValueError("not supported, leave it out")
        return value

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        """As a list of prompts, each text or token ids."""
        prompts = [value] if isinstance(value, str) or _are_tokens(value) else value
        shaped = isinstance(prompts, list) and all(isinstance(p, str | list) for p in prompts)
        if not shaped or not all(isinstance(p, str) or _are_tokens(p) for p in prompts if p):
            raise ValueError("expected a string, strings, token ids or lists of token ids")
        if not prompts or not all(prompts):
            raise ValueError("the prompt is empty")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts in a request")
        return prompts

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: Any) -> tuple[str, ...]:
        stop = [value] if isinstance(value, str) else value or []
        if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError("expected a string, or a list of strings, none of them empty")
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings")
        return tuple(stop)

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
        asked = {key: getattr(self, key) for key in ("temperature", "top_p", "top_k")}
        return default.model_copy(update={k: v for k, v in asked.items() if v is not None})


def _are_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
    )


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
    # A prompt of a megabyte should not come back in the error.
    return ApiError(f"{key}: {reason} (got {reprlib.repr(item['input'])})", param=param)


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, generations: list[Generation]) -> Usage:
        prompt = sum(g.prompt_tokens for g in generations)
        completion = sum(len(g.tokens) for g in generations)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
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
        )


class Choice(BaseModel):
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
    choices: list[Choice]
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
