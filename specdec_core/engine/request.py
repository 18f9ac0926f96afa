"""Requests to the engine, and the chunks that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.engine.scheduler import Limits
from specdec_core.tokens.statistics import Generation, TokenLogprobs
from specdec_core.tokens.token_tree import Origin


@dataclass(frozen=True)
class Request:
    """One text to complete. Without `sampling` the configuration's applies.

    Args:
        stop: strings that end the text and are not part of it.
        ignore_eos: whether it goes on after tokens that end texts.
        stop_tokens: tokens that end the text, also with `ignore_eos`. The token is in `tokens`, and
            not in the text.
        min_tokens: before so many new tokens none can end the text, and `stop` is not looked for
            in them.
        logprobs: the number of most likely tokens to return for each new one, beside its own
            log-probability; None: neither.
        speculate: the most consecutive candidates a round; 0: no speculation.
        written: output that there is already, each token with its origin, because another engine
            has begun the text: it goes on from there. A text that is fixed by the seed (greedy,
            coupled) goes on as it would have; another one's continuation has the target's
            distribution. The first chunk's text is all of the output's.
    """

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    speculate: int | None = None
    written: tuple[tuple[int, Origin], ...] = ()

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and what is written already."""
        return (*self.tokens, *(token for token, _ in self.written))

    def check(self, max_length: int, vocab_size: int, limits: Limits) -> None:
        """Raises :class:`UserError` for a prompt that is empty, has tokens outside the vocabulary,
        or does not fit, with its output, in `max_length` tokens or the whole cache; and for
        settings that cannot be met."""
        later = (self.stop_tokens, self.min_tokens, self.logprobs is not None)
        if any(later) or self.speculate is not None:
            raise UserError("not supported yet")
        if self.sampling is not None and self.sampling.edits_logits:
            raise UserError("penalties and logit_bias: not supported yet")
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
    """The addition of one round to a request. `text` is final; it lags behind `tokens` where a
    character or a stop string may still be completed."""

    request_id: str
    text: str
    tokens: list[int]
    origins: list[Origin]
    finished: Generation | None = None
    logprobs: list[TokenLogprobs] | None = None  # of each of `tokens`, where asked for
