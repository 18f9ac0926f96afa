"""A request while it is decoded: its slot, its text so far, and the accounts of its rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from specdec_core.drafting.drafter import SlotState
from specdec_core.engine.request import Chunk, Request
from specdec_core.tokens.detokenising import StreamDecoder
from specdec_core.tokens.statistics import FinishReason, Generation, Round
from specdec_core.tokens.token_tree import Origin, TokenTree


@dataclass(frozen=True, slots=True)
class Addition:
    """What a round adds to a request: the accepted nodes of its tree, with the target's own token
    behind them, up to the end of the request, and the `reason` why it ends, if it does. The first
    `started` nodes of the tree were the target's."""

    tree: TokenTree
    path: list[int]
    tokens: list[int]
    origins: list[Origin]
    text: str
    reason: FinishReason | None
    started: int


@dataclass(slots=True)
class ActiveRequest:
    """A request in its slot. Times are seconds."""

    request: Request
    state: SlotState
    decoder: StreamDecoder
    started: float  # when it entered
    prefill_seconds: float
    origins: list[Origin] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens that it may still get."""
        return self.request.max_new_tokens - len(self.origins)

    def cut(
        self, tokens: list[int], final: Collection[int], texts: bool
    ) -> tuple[list[int], str, FinishReason | None]:
        """`tokens` up to the end of the request, their text, and why the request ends, if it does;
        `final` tokens end it. Without `texts` the text waits for the end, unless there are stop
        strings to look out for."""
        request, decoder = self.request, self.decoder
        reason: FinishReason | None = None
        if not request.ignore_eos:
            ends = (i for i, token in enumerate(tokens) if token in final)
            if (end := next(ends, None)) is not None:
                tokens, reason = tokens[: end + 1], "stop"
        if reason is None and len(tokens) == self.remaining:
            reason = "length"
        if reason is None and not texts and not request.stop:
            return tokens, "", None
        unread = len(request.tokens) + decoder.used
        text = decoder.push([*self.state.tokens[unread:], *tokens])
        if decoder.stopped:
            return tokens[: decoder.used - len(self.origins)], text, "stop"
        return tokens, text if reason is None else text + decoder.finish(), reason

    def add(self, new: Addition) -> None:
        """Make the text longer."""
        self.state.tokens += new.tokens
        self.origins += new.origins

    def account(self, new: Addition, seconds: Mapping[str, float], now: float) -> Chunk:
        """Write down the round that has made the addition and took so many `seconds`, by the names
        of :class:`Round`'s fields; what it comes to for who has asked."""
        tree, after = new.tree, now - self.started
        self.rounds.append(
            Round(
                position=len(self.origins) - len(new.tokens),
                drafted=len(tree) - new.started,
                accepted=len(new.path) - bool(new.started),
                generated=len(new.tokens),
                draft_forwards=tree.draft_forwards,
                depth=tree.depth - bool(new.started),
                draft_tokens=tree.draft_tokens,
                arm=tree.arm,
                **seconds,
            )
        )
        self.token_seconds += [after] * len(new.tokens)
        finished = None if new.reason is None else self._finished(new.reason, after)
        return Chunk(self.request.id, new.text, new.tokens, new.origins, finished)

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
            token_seconds=self.token_seconds,
        )
