"""Requests to the engine, and the chunks that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.engine.scheduler import Limits
from specdec_core.tokens.statistics import Generation, Round
from specdec_core.tokens.token_tree import Origin


@dataclass(frozen=True)
class Request:
    """One text to complete. Without `sampling` the configuration's applies."""

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def check(self, max_length: int, vocab_size: int, limits: Limits) -> None:
        """Raises :class:`UserError` for a prompt that is empty, has tokens outside the vocabulary,
        or does not fit, with its output, in `max_length` tokens or the whole cache."""
        if not self.tokens:
            raise UserError("the prompt is empty")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if len(self.tokens) + self.max_new_tokens > max_length:
            raise UserError(
                f"the prompt has {len(self.tokens)} tokens and {self.max_new_tokens} new ones"
                f" were asked for, but the context holds {max_length}"
            )
        most = len(self.tokens) + self.max_new_tokens
        if not limits.holds(most):
            raise UserError(
                f"the prompt and its output take {most} tokens, but the cache holds"
                f" {limits.cache_tokens}, some of them for candidates"
            )
        if not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            raise UserError(f"the prompt has tokens outside 0…{vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The addition of one `round` to a request. `text` is final; it lags behind `tokens` where a
    character or a stop string may still be completed."""

    request_id: str
    text: str
    tokens: list[int]
    origins: list[Origin]
    round: Round
    finished: Generation | None = None
