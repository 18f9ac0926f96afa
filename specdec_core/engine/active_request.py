"""A running request: its slot, its sequence so far, and the records of its rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from specdec_core.drafting.drafter import SlotState
from specdec_core.engine.logprobs import Logprobs, PromptLogprobs
from specdec_core.engine.request import Candidates, Chunk, Request
from specdec_core.tokens.detokenising import StreamDecoder
from specdec_core.tokens.statistics import FinishReason, Generation, Round, TokenLogprobs
from specdec_core.tokens.token_tree import TokenOrigin, TokenTree


@dataclass(frozen=True, slots=True)
class Addition:
    """What a round adds to a request, up to the request's end: the accepted `path` of the tree and
    the target's own token after it. `reason` is None where the request does not end."""

    tree: TokenTree
    path: list[int]
    tokens: list[int]
    origins: list[TokenOrigin]
    text: str
    reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class ActiveRequest:
    """A request in its slot. Times are seconds."""

    request: Request
    state: SlotState
    decoder: StreamDecoder
    started: float  # when it entered its slot
    prefill_seconds: float = 0.0  # until its first token, and of the draft models' prefill
    cached: int = 0  # tokens of the prompt that the cache held when it entered
    origins: list[TokenOrigin] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    plain: bool = False  # whether its next round has no candidates
    logprobs: Logprobs | None = None  # where asked for
    prompt_logprobs: PromptLogprobs | None = None  # where asked for

    @classmethod
    def begin(
        cls, request: Request, state: SlotState, decoder: StreamDecoder, started: float
    ) -> ActiveRequest:
        """A request that enters its slot."""
        origins = [origin for _, origin in request.written]
        active = cls(request, state, decoder, started, origins=origins)
        if request.logprobs is not None:
            active.logprobs = Logprobs(request.logprobs)
            if request.prompt_logprobs:
                active.prompt_logprobs = PromptLogprobs(request.tokens, request.logprobs)
        return active

    @property
    def begun(self) -> bool:
        """Whether it has had its first round, which prefills the end of its prompt."""
        return bool(self.rounds)

    @property
    def measures(self) -> bool:
        """Whether the logits of its prompt are still wanted."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.complete

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - len(self.origins)

    @property
    def room(self) -> int:
        """The most consecutive candidates of its next round, to which the target adds a token."""
        room, most = max(self.remaining - 1, 0), self.request.speculate
        return room if most is None else min(room, most)

    def cut(
        self, tokens: list[int], final: Collection[int], texts: bool
    ) -> tuple[list[int], str, FinishReason | None]:
        """`tokens` up to the end of the request, their text, and the finish reason, if the request
        ends. A `final` token ends it. With `texts` false the text is left for the end, unless there
        are stop strings."""
        request, decoder = self.request, self.decoder
        reason: FinishReason | None = None
        tokens = tokens[: self.remaining]  # also where none may be generated
        ends = (i for i, token in enumerate(tokens) if token in final)
        if (end := next(ends, None)) is not None:
            tokens, reason = tokens[: end + 1], "stop"
            warper, output = self.state.warper, self.state.tokens[len(request.tokens) :] + tokens
            if warper is not None and warper.matcher and warper.matcher.cut_short(output):
                reason = "length"
        if reason is None and len(tokens) == self.remaining:
            reason = "length"
        if reason is None and not texts and not request.stop:
            return tokens, "", None
        unread = len(request.tokens) + decoder.used
        shown = tokens if end is None else tokens[:-1]  # a final token has no text
        text = decoder.push([*self.state.tokens[unread:], *shown])
        if decoder.stopped:
            return tokens[: decoder.used - len(self.origins)], text, "stop"
        return tokens, text if reason is None else text + decoder.finish(), reason

    def add(self, addition: Addition) -> None:
        """Append to the sequence."""
        self.state.tokens += addition.tokens
        self.origins += addition.origins

    def account(self, addition: Addition, seconds: Mapping[str, float], now: float) -> Chunk:
        """Record the round of this addition. `seconds` has its times by the names of
        :class:`Round`'s fields. Returns the chunk for the caller."""
        tree, after = addition.tree, now - self.started
        prompt = None
        if not self.begun:
            self.prefill_seconds, prompt = after, self._prompt_logprobs
        round = Round(
            position=len(self.origins) - len(addition.tokens),
            drafted=len(tree) - tree.begun,
            accepted=max(len(addition.path) - bool(tree.begun), 0),
            generated=len(addition.tokens),
            draft_forwards=tree.draft_forwards,
            depth=tree.depth - bool(tree.begun),
            draft_tokens=tree.draft_tokens,
            arm=tree.arm,
            **seconds,
        )
        self.rounds.append(round)
        finished = None if addition.reason is None else self._finished(addition.reason, after)
        return Chunk(
            self.request.id,
            addition.text,
            addition.tokens,
            addition.origins,
            round,
            finished,
            addition.logprobs,
            Candidates.of(tree, addition.path) if self.request.trace else None,
            prompt,
        )

    @property
    def _prompt_logprobs(self) -> list[TokenLogprobs] | None:
        return None if self.prompt_logprobs is None else self.prompt_logprobs.tokens

    def _finished(self, reason: FinishReason, seconds: float) -> Generation:
        return Generation(
            request_id=self.request.id,
            prompt_tokens=len(self.request.tokens),
            tokens=self.state.tokens[len(self.request.tokens) :],
            text=self.decoder.text,
            origins=self.origins,
            rounds=self.rounds,
            finish_reason=reason,
            prefill_seconds=self.prefill_seconds,
            seconds=seconds,
            cached_tokens=self.cached,
            logprobs=None if self.logprobs is None else self.logprobs.tokens,
            prompt_logprobs=self._prompt_logprobs,
        )
