"""The engine's requests for a request's choices."""

from __future__ import annotations

import random
import secrets
import uuid
from collections.abc import Iterator, Sequence

from cluster.serving.engine_process import EngineProcess
from cluster.serving.http.service import Service
from cluster.serving.protocol.errors import ApiError, conflict
from cluster.serving.protocol.generation import GenerationRequest, check_tokens
from specdec_core.base.errors import UserError
from specdec_core.engine import Request
from specdec_core.tokens.grammar import Grammar, grammars_of

MAX_TOGETHER = 128  # choices of a request


def choices(
    service: Service,
    body: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    default_tokens: int | None,
    shown: frozenset[int] = frozenset(),
) -> list[Request]:
    """An engine request for each choice; the choices of a prompt are consecutive.

    Without a limit in the request a choice gets `default_tokens` tokens, or as many as the context
    and the key's minute have room for. The special tokens `shown` are part of the text.

    Raises:
        ApiError: fields do not go together, or ask for more than there is room for.
    """
    engine = service.engine
    if len(prompts) * body.choices > MAX_TOGETHER:
        raise ApiError(
            f"n: {len(prompts)} prompts with {body.choices} choices each are more than"
            f" {MAX_TOGETHER} choices",
            param="n",
            code="too_many_choices",
        )
    stops = frozenset(body.stop_token_ids or ())
    check_tokens(stops, engine.vocab_size, "stop_token_ids")
    grammar = _grammar(engine, body)
    sampling = body.sampling(engine.configuration.sampling, engine.vocab_size)
    if (minute := service.access.allowance.tokens) is not None:
        # At least one: a prompt that needs more than a minute's tokens is refused later.
        granted = max((minute - sum(map(len, prompts))) // (len(prompts) * body.choices), 1)
        default_tokens = min(default_tokens or granted, granted)
    random_seeds = seeds(body.seed)
    return [
        Request(
            id=uuid.uuid4().hex,
            tokens=prompt,
            max_new_tokens=new_tokens,
            sampling=sampling,
            seed=next(random_seeds),
            stop=body.stops,
            ignore_eos=bool(body.ignore_eos),
            stop_tokens=stops,
            min_tokens=body.min_tokens or 0,
            logprobs=0 if body.traced and body.tops is None else body.tops,
            prompt_logprobs=body.measures_prompt,
            grammar=grammar,
            speculate=body.speculative.most if body.speculative else None,
            trace=body.traced,
            shown=shown,
        )
        for prompt in prompts
        for new_tokens in [_new_tokens(service, body, len(prompt), default_tokens)]
        for _ in range(body.choices)
    ]


def _grammar(engine: EngineProcess, body: GenerationRequest) -> Grammar | None:
    """The compiled grammar of the output, so that an invalid one does not reach the engine. Raises
    :class:`ApiError`."""
    if (wanted := body.grammar) is None:
        return None
    field, grammar = wanted
    for name in ("min_tokens", "ignore_eos"):
        if getattr(body, name):
            raise conflict(name, f"does not go together with {field}: what is complete has to end")
    known = grammars_of(engine.pair.tokenizer, engine.vocab_size, engine.pair.eos_token_ids)
    try:
        return known.prepared(grammar)
    except UserError as error:
        raise ApiError(f"{field}: {error}", param=field, code="invalid_grammar") from None


def _new_tokens(service: Service, body: GenerationRequest, length: int, default: int | None) -> int:
    """The most new tokens for a prompt of `length` tokens. Raises :class:`ApiError`."""
    most, allowed = service.engine.max_length, service.access.limits.tokens
    room = max(most - length, 1)
    new_tokens = body.most_tokens
    if new_tokens is None:
        new_tokens = min(default or room, room, allowed or room)
    if length + new_tokens > most:
        raise ApiError(
            f"the context holds {most} tokens here, but the prompt has {length} and"
            f" max_tokens is {new_tokens}",
            param="prompt" if length >= most else "max_tokens",
            code="context_length_exceeded",
        )
    if allowed is not None and new_tokens > allowed:
        raise ApiError(
            f"max_tokens: {new_tokens} is more than the {allowed} that a request may ask for here",
            param="max_tokens",
            code="too_many_tokens",
        )
    if (least := body.min_tokens or 0) > new_tokens:
        raise conflict("min_tokens", f"{least} is more than max_tokens, which is {new_tokens}")
    return new_tokens


def seeds(seed: int | None) -> Iterator[int]:
    """The seeds of a request's choices, one random stream for each. The first seed is `seed`, or a
    random number without one; all other seeds follow from the first."""
    first = secrets.randbits(63) if seed is None else seed
    yield first
    following = random.Random(f"choices {first}")
    while True:
        yield following.getrandbits(63)
