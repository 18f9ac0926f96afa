"""Requests for prompts: one for each prompt, and one for each turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine.engine import Engine
from specdec_core.engine.request import Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import Conversation, conversations, turn_id
from specdec_core.prompts.prompt import Prompt


def requests_of(
    prompts: Sequence[Prompt],
    pair: Pair,
    max_new_tokens: int,
    first: int = 0,
    engine: Engine | None = None,
) -> list[Request]:
    """Requests for prompts that were loaded for the pair's tokenizer; seeds count from `first`.

    A later turn follows the target's own greedy answers to the earlier turns, each of at most
    `max_new_tokens`, as in MT-Bench and Spec-Bench. Answers are decoded one at a time, so that the
    same pair and conversation always give the same requests. `engine` is an engine of the pair to
    decode them with; unset, one is opened where it is needed.

    Raises :class:`UserError` for a prompt that does not fit.
    """
    requests: list[Request] = []
    for asked in conversations(prompts, pair.tokenizer, max_new_tokens, pair.max_length):
        if asked.turns > 1:
            engine = engine or Engine(pair)
        for number, tokens in enumerate(_turns(asked, engine, max_new_tokens), start=1):
            seed = first + len(requests)
            name = turn_id(asked.prompt.id, number)
            requests.append(Request(name, tokens, max_new_tokens, seed=seed))
    return requests


def _turns(
    asked: Conversation, engine: Engine | None, max_new_tokens: int
) -> list[tuple[int, ...]]:
    """The tokens of every turn."""
    turns, answers = [asked.tokens()], list[str]()
    while len(turns) < asked.turns:
        assert engine is not None
        answers.append(asked.answer(_greedy(engine, turns[-1], max_new_tokens)))
        turns.append(asked.tokens(answers))
    return turns


def _greedy(engine: Engine, tokens: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """The target's greedy output."""
    before = engine.configuration
    engine.configure(AUTOREGRESSIVE)
    (generation,) = engine.generate([Request("answer", tokens, max_new_tokens)])
    engine.configure(before)
    return generation.tokens
