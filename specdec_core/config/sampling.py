"""How tokens are drawn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

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


class Sampling(Value):
    """How a distribution is made from logits; applied alike to target and draft model."""

    temperature: Temperature = Field(default=0.0, description="0 is greedy decoding")
    top_k: int = Field(default=0, ge=0, description="keep the k most likely tokens; 0 keeps all")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass kept")
    coupling: Literal["rejection", "gumbel"] = Field(
        default="rejection",
        description="the acceptance rule when sampling, both lossless: rejection sampling, or draft"
        " and target choosing with the same noise (specdec_core.tokens.coupling)",
    )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def fixed_output(self) -> bool:
        """Whether the output depends on the target, the prompt and the seed alone, and not on the
        drafts. Then any drafter can be replayed from a recorded trace."""
        return self.greedy or self.coupling == "gumbel"
