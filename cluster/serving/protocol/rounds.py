"""The rounds that a stream's tokens came from, for `stream_options.include_rounds`."""

from __future__ import annotations

from pydantic import BaseModel

from specdec_core.tokens.token_tree import TokenOrigin


class RoundToken(BaseModel):
    """A new token. `probability` is the target model's, before any warper; `drafted` the draft
    model's, where it drew the token. A `branch` was not the first candidate drawn at its place."""

    text: str  # the next token may complete a character of it
    origin: TokenOrigin
    probability: float | None
    drafted: float | None
    branch: bool


class Candidate(BaseModel):
    """A node of the draft tree. `parent` is the index of its parent, -1 the end of the sequence."""

    text: str
    parent: int
    origin: TokenOrigin
    probability: float | None  # the draft model's
    accepted: bool


class StreamedRound(BaseModel):
    """One round of one choice. The times are the engine step's, which all its requests share."""

    index: int  # of the choice
    tokens: list[RoundToken]
    candidates: list[Candidate]
    drafted: int
    accepted: int
    arm: str | None  # the label of the drafter, where it changes between rounds
    milliseconds: float
    draft_milliseconds: float
    target_milliseconds: float
