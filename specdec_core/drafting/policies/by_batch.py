"""The draft length that follows how many requests are decoded together."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from specdec_core.config import PolicySettings
from specdec_core.drafting.policies.policy import LengthPolicy


class ByBatchSettings(PolicySettings):
    """K candidate tokens by the number of requests decoded together: `tokens[n]` from n requests
    on, up to the next larger key; 0 drafts nothing. With more requests a forward of several tokens
    each stops being nearly free, and a rejected candidate begins to cost."""

    kind: Literal["by_batch"] = "by_batch"
    tokens: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0, le=128)]]

    replayed: ClassVar = True

    @field_validator("tokens")
    @classmethod
    def _in_order(cls, tokens: dict[int, int]) -> dict[int, int]:
        if 1 not in tokens:
            raise ValueError("no K for 1 request, with which it has to begin")
        if not any(tokens.values()):
            raise ValueError("drafts nothing at any number of requests")
        return dict(sorted(tokens.items()))

    def __hash__(self) -> int:
        return hash(tuple(self.tokens.items()))

    @property
    def max_tokens(self) -> int:
        return max(self.tokens.values())

    def at(self, requests: int) -> int:
        """K when `requests` are decoded together."""
        return next(k for least, k in reversed(self.tokens.items()) if least <= requests)

    @property
    def label(self) -> str:
        return f"K={'/'.join(map(str, self.tokens.values()))} by batch"


class ByBatchPolicy(LengthPolicy):
    """K by the number of requests in the round. A request's drafts then depend on the size of the
    batch, but neither its greedy output does, nor the distribution of a sampled one."""

    settings: ByBatchSettings

    def __init__(self, settings: ByBatchSettings) -> None:
        super().__init__(settings)
        self.rests = 0 in settings.tokens.values()

    def limit(self, slot: int, batch: int = 1) -> int:
        return self.settings.at(batch)
