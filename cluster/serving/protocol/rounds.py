"""The rounds that a stream's tokens came from, where it is asked for with
`stream_options.include_rounds`."""

from __future__ import annotations

from pydantic import BaseModel

from specdec_core.tokens.token_tree import TokenOrigin


class RoundToken(BaseModel):
    """A new token. `probability` is the target's, of its logits as they are; `drafted` the
    drafter's, where it drew the token and that is known. A `branch` is no first choice: it hangs
    in the tree beside a candidate that was drawn before it."""

    text: str  # may be completed by the next token's
    origin: TokenOrigin
    probability: float | None
    drafted: float | None
    branch: bool


class Candidate(BaseModel):
    """A node of the draft tree; `parent` is its parent's number, -1 the text before the round."""

    text: str
    parent: int
    origin: TokenOrigin
    probability: float | None  # the drafter's
    accepted: bool


class StreamedRound(BaseModel):
    """One round of one choice. Times are those of the engine's step, which requests share."""

    index: int  # of the choice
    tokens: list[RoundToken]
    candidates: list[Candidate]
    drafted: int
    accepted: int
    arm: str | None  # who drafted, where that changes from round to round
    milliseconds: float
    draft_milliseconds: float
    target_milliseconds: float
