"""How tokens are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from specdec_core.config.base import Value

# Logits divided by less may overflow float32, here or in a peer; the most likely token is all but
# certain long before.
_LEAST = 1e-30

Temperature = Annotated[
    float,
    Field(ge=0, le=1e38, allow_inf_nan=False),
    AfterValidator(lambda value: value if value >= _LEAST else 0.0),
]
"""Logits are divided by this; 0, or a number too small to divide by, is greedy decoding."""

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Bias = tuple[
    Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
]


def _pairs(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _in_order(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a token is given twice")
    return tuple(sorted(pairs))


LogitBias = Annotated[
    tuple[_Bias, ...],
    BeforeValidator(_pairs),
    AfterValidator(_in_order),
    PlainSerializer(dict, return_type=dict[int, float]),
]
"""Numbers to add to tokens' logits: pairs in the order of the tokens, given as a mapping."""


def _later(default: Any, **more: Any) -> Any:
    """A field that was added later: it is not written at its default, so that ids and files stay as
    they were."""
    return Field(default=default, exclude_if=lambda value: value == default, **more)


class Sampling(Value):
    """How a distribution is made from logits; applied alike to target and draft model.

    In this order, which is vLLM's: the logit bias, the penalties (repetition, then frequency and
    presence), temperature, min-p, top-k, top-p. Greedy decoding takes the largest score after the
    penalties. The repetition penalty applies to the tokens of prompt and output, as in
    transformers; the other penalties apply to the tokens of the output.
    """

    temperature: Temperature = Field(default=0.0, description="0 is greedy decoding")
    top_k: int = Field(default=0, ge=0, description="keep the k most likely tokens; 0 keeps all")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass kept")
    coupling: Literal["rejection", "gumbel"] = Field(
        default="rejection",
        description="the acceptance rule when sampling, both lossless: rejection sampling, or draft"
        " and target choosing with the same noise (specdec_core.tokens.coupling)",
    )
    min_p: float = _later(
        0.0,
        ge=0,
        le=1,
        description="keep tokens with at least this share of the largest probability",
    )
    presence_penalty: Penalty = _later(
        0.0, description="subtracted from the logits of tokens in the output"
    )
    frequency_penalty: Penalty = _later(
        0.0, description="the same, as often as a token is in the output"
    )
    repetition_penalty: float = _later(
        1.0,
        ge=1e-6,
        le=1e6,
        description="divides the positive logits of tokens in prompt or output, and multiplies the"
        " negative ones",
    )
    logit_bias: LogitBias = _later((), description="added to the logits of these tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature, under greedy decoding, too."""
        return bool(self.logit_bias) or self.penalises

    @property
    def penalises(self) -> bool:
        """Whether a distribution depends on which tokens the text has."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1)

    @property
    def fixed_output(self) -> bool:
        """Whether the output depends on the target, the prompt and the seed alone, and not on the
        drafts. Then any drafter can be replayed from a recorded trace."""
        return self.greedy or self.coupling == "gumbel"

    @property
    def label(self) -> str:
        """What is not default, in short; empty for plain greedy decoding."""
        return ", ".join(short for short, _ in self._unusual())

    @property
    def sentence(self) -> str:
        """The same in words, without a full stop."""
        return ", ".join(long for _, long in self._unusual()).capitalize()

    def _unusual(self) -> Iterator[tuple[str, str]]:
        """What is not default, in short and in words."""
        if not self.greedy:
            temperature = f"{self.temperature:g}"
            yield f"T={temperature}", f"sampled at temperature {temperature}"
            if self.min_p > 0:
                yield f"min-p={self.min_p:g}", f"min-p {self.min_p:g}"
            if self.top_k:
                yield f"top-k={self.top_k}", f"from the {self.top_k} likeliest tokens"
            if self.top_p < 1:
                yield f"top-p={self.top_p:g}", f"top-p {self.top_p:g}"
            if self.coupling == "gumbel":
                yield "coupled", "draft and target with the same noise"
        for name in ("repetition", "frequency", "presence"):
            penalty = getattr(self, f"{name}_penalty")
            if penalty != type(self).model_fields[f"{name}_penalty"].default:
                yield f"{name}={penalty:g}", f"{name} penalty {penalty:g}"
        if self.logit_bias:
            count = len(self.logit_bias)
            yield f"bias on {count}", f"biases on {count} tokens"
