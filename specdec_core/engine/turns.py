"""Requests for prompts: one for each prompt, and one for each turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine.engine import Engine
from specdec_core.engine.request import Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import conversations, turn_id
from specdec_core.prompts.prompt import Prompt


def requests_of(
    prompts: Sequence[Prompt],
    pair: Pair,
    max_new_tokens: int,
    first: int = 0,
    engine: Engine | None = None,
    together: bool = False,
) -> list[Request]:
    """Requests for prompts that were loaded for the pair's tokenizer; seeds count from `first`.

    A later turn follows the target's own greedy answers to the earlier turns, each of at most
    `max_new_tokens`, as in MT-Bench and Spec-Bench. Answers are decoded one at a time, so that the
    same pair and conversation always give the same requests. Decoded `together`, which is faster,
    an answer may differ by rounding. `engine` is an engine of the pair to decode them with; unset,
    one is opened where it is needed.

    Raises :class:`UserError` for a prompt that does not fit.
    """
    asked = conversations(prompts, pair.tokenizer, max_new_tokens, pair.max_length)
    turns, answers = [[each.tokens()] for each in asked], [list[str]() for _ in asked]
    while left := [n for n, each in enumerate(asked) if len(turns[n]) < each.turns]:
        engine = engine or Engine(pair)
        outputs = _greedy(engine, [turns[n][-1] for n in left], max_new_tokens, together)
        for n, output in zip(left, outputs, strict=True):
            answers[n].append(asked[n].answer(output))
            turns[n].append(asked[n].tokens(answers[n]))
    named = [
        (turn_id(each.prompt.id, number), tokens)
        for each, own in zip(asked, turns, strict=True)
        for number, tokens in enumerate(own, start=1)
    ]
    return [
        Request(name, tokens, max_new_tokens, seed=seed)
        for seed, (name, tokens) in enumerate(named, start=first)
    ]


def _greedy(
    engine: Engine, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, together: bool
) -> list[list[int]]:
    """The target's greedy outputs."""
    requests = [Request(f"answer {n}", each, max_new_tokens) for n, each in enumerate(prompts)]
    before = engine.configuration
    engine.configure(AUTOREGRESSIVE)
    size = len(requests) if together else 1
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    outputs = [generation.tokens for group in groups for generation in engine.generate(group)]
    engine.configure(before)
    return outputs
