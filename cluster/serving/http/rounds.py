"""The rounds that a stream's tokens came from, for `stream_options.include_rounds`."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from pydantic import BaseModel

from cluster.serving.http.service import Service
from cluster.serving.protocol.counts import drafted_by, has_arms
from specdec_core.config import Configuration
from specdec_core.engine import Chunk, Request
from specdec_core.engine.request import Candidates
from specdec_core.tokens.detokenising import StreamDecoder
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


class Rounds:
    """The rounds of an answer's choices. A chunk's text may end within a token, so each token is
    decoded here; joined, these texts are the choice's."""

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self._name = service.prompts.texts.named
        tokenizer, ends = service.prompts.tokenizer, service.engine.pair.eos_token_ids
        self._final = [r.final(ends) for r in requests]
        self._decoders = [
            StreamDecoder(tokenizer, r.stop, r.tokens, r.min_tokens, r.shown) for r in requests
        ]

    def of(self, index: int, chunk: Chunk, configuration: Configuration) -> StreamedRound:
        """The round of a chunk of the choice `index`, decoded by `configuration`."""
        round, drawn = chunk.round, chunk.candidates
        assert drawn is not None  # the request has a trace
        nodes = zip(drawn.tokens, drawn.parents, drawn.origins, drawn.probabilities, strict=True)
        return StreamedRound(
            index=index,
            tokens=self._tokens(index, chunk, drawn),
            candidates=[
                Candidate(
                    text=self._name(token)[0],
                    parent=parent,
                    origin=origin,
                    probability=probability,
                    accepted=node in drawn.path,
                )
                for node, (token, parent, origin, probability) in enumerate(nodes)
            ],
            drafted=round.drafted,
            accepted=round.accepted,
            arm=drafted_by(configuration, round.arm) if has_arms(configuration) else None,
            milliseconds=1e3 * round.seconds,
            draft_milliseconds=1e3 * round.draft_seconds,
            target_milliseconds=1e3 * round.target_seconds,
        )

    def _tokens(self, index: int, chunk: Chunk, drawn: Candidates) -> list[RoundToken]:
        decoder, tokens = self._decoders[index], []
        for place, (token, origin) in enumerate(zip(chunk.tokens, chunk.origins, strict=True)):
            node = drawn.path[place] if place < len(drawn.path) else None
            # The token that ends a sequence has no text.
            ends = chunk.finished is not None and token in self._final[index]
            tokens.append(
                RoundToken(
                    text="" if ends else decoder.push([token]),
                    origin=origin,
                    probability=exp(chunk.logprobs[place].logprob) if chunk.logprobs else None,
                    drafted=None if node is None else drawn.probabilities[node],
                    branch=node is not None and drawn.parents[node] in drawn.parents[:node],
                )
            )
        if chunk.finished and tokens:
            tokens[-1].text += decoder.finish()
        return tokens
