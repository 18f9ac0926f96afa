"""Requests to the engine, and the chunks that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.tokens.grammar import Grammar
from specdec_core.tokens.statistics import Generation, Round, TokenLogprobs
from specdec_core.tokens.text_warper import TextRules
from specdec_core.tokens.token_tree import TokenOrigin, TokenTree
from specdec_core.tokens.verification import chance


@dataclass(frozen=True)
class Request:
    """A prompt to continue. Without `sampling` the configuration's applies.

    Args:
        max_new_tokens: the most tokens of output; 0 only prefills the prompt.
        stop: strings that end the output and are not part of its text.
        ignore_eos: whether the model's end-of-sequence tokens do not end the output.
        stop_tokens: tokens that end the output, also with `ignore_eos`. The token is in `tokens`,
            and not in the text.
        min_tokens: the first `min_tokens` tokens cannot end the output, and `stop` does not apply
            to their text.
        logprobs: the number of most likely tokens to return with each token's log-probability;
            None: no log-probabilities.
        prompt_logprobs: whether to return log-probabilities of the prompt, too. All of the prompt
            is then prefilled, without prefix-cache hits.
        grammar: what the output must follow, unless `max_new_tokens` cuts it.
        speculate: the most consecutive candidates of a round; 0: no speculation.
        trace: whether each chunk has its round's candidates.
        shown: special tokens that are part of the text; other special tokens are left out.
        written: output that another engine has generated already, each token with its origin. The
            engine resumes after it. Output that is fixed by the seed (greedy, coupled) is the same
            as without interruption; sampled output has the target's distribution. The first chunk
            has the text of all output.
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
    prompt_logprobs: bool = False
    speculate: int | None = None
    grammar: Grammar | None = None
    trace: bool = False
    shown: frozenset[int] = frozenset()
    written: tuple[tuple[int, TokenOrigin], ...] = ()

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and the output that another engine has generated."""
        return (*self.tokens, *(token for token, _ in self.written))

    def check(self, max_length: int, vocab_size: int) -> None:
        """Raises :class:`UserError` for a prompt that is empty, has tokens outside the vocabulary,
        or does not fit with its output in `max_length` tokens; and for settings that contradict
        each other."""
        if not self.tokens:
            raise UserError("the prompt is empty")
        if self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_tokens must be between 0 and max_new_tokens ({self.max_new_tokens}), got"
                f" {self.min_tokens}"
            )
        if len(self.written) > self.max_new_tokens:
            raise UserError(
                f"{len(self.written)} tokens are written already, more than max_new_tokens"
                f" ({self.max_new_tokens})"
            )
        if "" in self.stop:
            raise UserError("stop: a stop string is empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= vocab_size:
            raise UserError(f"logprobs must be between 0 and {vocab_size}, got {self.logprobs}")
        if self.prompt_logprobs and self.logprobs is None:
            raise UserError("prompt_logprobs needs logprobs")
        if self.speculate is not None and self.speculate < 0:
            raise UserError(f"speculate must be at least 0, got {self.speculate}")
        if len(self.tokens) + self.max_new_tokens > max_length:
            raise UserError(
                f"the prompt has {len(self.tokens)} tokens and {self.max_new_tokens} new ones"
                f" were asked for, but the context holds {max_length}"
            )
        if not 0 <= min(self.text) <= max(self.text) < vocab_size:
            raise UserError(f"the prompt has tokens outside 0…{vocab_size - 1}")
        bias = [token for token, _ in self.sampling.logit_bias] if self.sampling else []
        for name, tokens in (("stop_tokens", self.stop_tokens), ("logit_bias", bias)):
            if outside := [token for token in tokens if not 0 <= token < vocab_size]:
                raise UserError(f"{name}: {outside[0]} is no token, they are 0…{vocab_size - 1}")
        if self.min_tokens and len(self.stop_tokens) == vocab_size:
            raise UserError("min_tokens: every token would end the text")
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            raise UserError(
                "a grammar takes neither min_tokens nor ignore_eos: what is complete has to end"
            )

    def final(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end its output, given those that end the model's sequences."""
        return self.stop_tokens if self.ignore_eos else self.stop_tokens | eos_token_ids

    def rules(self, sampling: Sampling, eos_token_ids: frozenset[int]) -> TextRules:
        """The rules for its next token that depend on its sequence."""
        final = self.stop_tokens | eos_token_ids
        return TextRules(sampling, len(self.tokens), self.min_tokens, final, self.grammar)


@dataclass(frozen=True, slots=True)
class Candidates:
    """A round's draft tree, as :class:`TokenTree` has it, and its accepted nodes, `path`. Of the
    distribution that a candidate was drawn from it has only the candidate's probability (None: not
    drawn, or not needed)."""

    tokens: list[int]
    parents: list[int]
    origins: list[TokenOrigin]
    probabilities: list[float | None]
    path: list[int]

    @classmethod
    def of(cls, tree: TokenTree, path: list[int]) -> Candidates:
        drawn = zip(tree.tokens, tree.draft_probs, strict=True)
        probabilities = [None if q is None else chance(q, token) for token, q in drawn]
        return cls(tree.tokens, tree.parents, tree.origins, probabilities, path)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one `round` added to a request's output. `text` is final; it lags behind `tokens` while
    a character or a stop string may still be completed."""

    request_id: str
    text: str
    tokens: list[int]
    origins: list[TokenOrigin]
    round: Round
    finished: Generation | None = None
    logprobs: list[TokenLogprobs] | None = None  # of each of `tokens`, where asked for
    candidates: Candidates | None = None  # where asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first one, where asked for

    @property
    def adds(self) -> bool:
        """Whether it has tokens or ends the request. Where the target begins the trees, a request's
        first round does neither."""
        return bool(self.tokens) or self.finished is not None
