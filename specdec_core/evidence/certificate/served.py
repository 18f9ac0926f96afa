"""A server's output with speculation is its output without, checked over HTTP.

The server without speculation is the reference: its greedy outputs, and its own log-probabilities
of the tokens that the other one has sampled. A server gives those before its sampling changes them,
and of its most likely tokens only. So tokens are sampled at temperature 1 without top-k, top-p or
penalties, and the sets that are counted hold tokens among the reference's most likely ones. It is
assumed that the log-probabilities of a given sequence are the probabilities by which it would be
decoded, up to rounding. Rounding changes far less than what the test detects.

Where it gives no log-probabilities, the target's weights on this machine give the probabilities.
Where there is no server without speculation, they are the whole reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf

import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.engine import Request
from specdec_core.evidence.certificate.certify import Extent
from specdec_core.evidence.certificate.outputs import Asked, Reference, Speculated
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import conversations, turn_id
from specdec_core.prompts.prompt import Prompt
from specdec_core.servers.completions import SAMPLED, TOPS, AnswerServer, NoAnswer


def first_turns(prompts: Sequence[Prompt], pair: Pair, extent: Extent) -> Asked:
    """Requests for the first turn of each prompt. Raises :class:`UserError` for a prompt that does
    not fit."""
    length = extent.max_new_tokens
    asked = conversations(prompts, pair.tokenizer, length, pair.max_length)
    greedy = [Request(turn_id(c.prompt.id, 1), c.tokens([]), length) for c in asked]
    return Asked.of(greedy, extent.texts)


def server_reference(
    server: AnswerServer, asked: Asked, pair: Pair, clients: int, observer: Observer
) -> Reference:
    """A server without speculation. Raises :class:`UserError` where it does not answer."""
    greedy = answers(server, asked.greedy, clients, observer)
    size = pair.target.config.get_text_config(decoder=True).vocab_size
    return Reference(greedy, partial(_margin, server), partial(_known, server, size))


def gives_logprobs(server: AnswerServer, asked: Asked) -> bool:
    """Whether a server can be the reference of what is sampled. Raises :class:`UserError` where it
    does not answer."""
    try:
        server.logprobs(asked.greedy[0].tokens)
    except NoAnswer:
        raise
    except UserError:
        return False
    return True


def answers(
    server: AnswerServer,
    requests: Sequence[Request],
    clients: int,
    observer: Observer,
    stage: str = "greedy texts, autoregressive",
    sampled: bool = False,
) -> list[list[int]]:
    """A server's answers, `clients` requests at a time; unless said otherwise, the greedy ones of a
    server without speculation. Raises :class:`UserError`."""
    observer.stage(stage, len(requests))

    def answer(request: Request) -> list[int]:
        fields = {**SAMPLED, "seed": request.seed} if sampled else {}
        return server.complete(request.tokens, request.max_new_tokens, **fields)

    found = []
    pool = ThreadPoolExecutor(clients)
    try:
        for each in pool.map(answer, requests):
            found.append(each)
            observer.step()
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def server_outputs(
    server: AnswerServer, asked: Asked, clients: int, observer: Observer
) -> Speculated:
    """The answers of a server with speculation. Raises :class:`UserError` where it does not answer,
    or by its metrics drafts nothing."""
    before = server.candidates or 0.0
    found = Speculated(
        answers(server, asked.greedy, clients, observer, "greedy texts, speculative"),
        answers(server, asked.sampled, clients, observer, "sampled texts", sampled=True),
    )
    if server.candidates == before:
        raise UserError(f"{server.url}: drafts no candidate tokens: start it with speculation")
    return found


def _margin(server: AnswerServer, tokens: Sequence[int], preferred: int, other: int) -> float:
    """By how much a server's logit of one token is higher than that of another; infinite for a
    token that is not among the most likely ones."""
    logprobs = server.logprobs([*tokens, preferred])[-1]
    return logprobs[preferred] - logprobs.get(other, -inf)


def _known(
    server: AnswerServer, vocab_size: int, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """A server's probabilities of the most likely tokens, for each token of an output behind its
    first. A token that is known only because it was sampled is left out: whether a set holds it
    would depend on the sample."""
    rows = server.logprobs([*prompt, *output])[len(prompt) :]
    probs = torch.zeros(len(rows), vocab_size, dtype=torch.float64)
    for row, logprobs in zip(probs, rows, strict=True):
        tops = sorted(logprobs.items(), key=lambda item: -item[1])[:TOPS]
        tokens, values = zip(*tops, strict=True)
        row[list(tokens)] = torch.tensor(values, dtype=torch.float64).exp()
    return probs
