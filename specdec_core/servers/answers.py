"""A server's greedy answers, to be recorded in the place of a target's output.

The target's tokenizer and configuration are on this machine; its weights need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, Value
from specdec_core.engine import Request
from specdec_core.models.loading import load_config, load_skeleton
from specdec_core.models.pair import (
    Pair,
    check_pair,
    eagle_heads_of,
    feature_layers_of,
    load_drafts,
    resolve_dtypes,
)
from specdec_core.prompts.conversation import Conversation, turn_id
from specdec_core.recordings.plan import Batch, RecordingPlan, ShardPrompt
from specdec_core.recordings.schema import PROMPTS, read_table, shard_file, shards
from specdec_core.servers.completions import AnswerServer

_AHEAD = 4  # prompts for each client that are sent beyond the shard that is taken next
_COMPARED = 8  # tokens of an answer that must be the same when a recording is resumed


class Answer(NamedTuple):
    """The tokens that a server answers a request with; for heads also the target's features of
    prompt and answer, but the last token (n, layers · width)."""

    request: Request
    tokens: list[int]
    features: Tensor | None = None


class ServerAddress(Value):
    """A running server. With several models, `model` chooses one. `clients` prompts are sent at a
    time."""

    url: str
    model: str | None = None
    clients: PositiveInt = 16


def open_server(address: ServerAddress, plan: RecordingPlan) -> AnswerServer:
    """The server, for a plan's pair. Raises :class:`UserError` for a plan that needs more than
    greedy answers, and where the server does not answer."""
    if not plan.sampling.greedy:
        raise UserError(
            "--server: greedy answers can be recorded; sampling needs the target's logits, which a"
            " server does not give"
        )
    tokenizer = check_pair(plan.pair, served=True)
    target = Pair(plan.pair, tokenizer, load_skeleton(plan.pair.target))
    layers = served_layers(plan.pair)
    server = AnswerServer(address.url, tokenizer, target.eos_token_ids, address.model)
    if layers:
        width = target.target.config.get_text_config(decoder=True).hidden_size
        _check_features(server, layers, width)
    return server


def served_layers(spec: PairSpec) -> tuple[int, ...]:
    """The target's layers that heads of a pair read, as a server may give them. Raises
    :class:`UserError` for a head that reads what the output layer reads."""
    layers = feature_layers_of(spec)
    count = load_config(spec.target).get_text_config(decoder=True).num_hidden_layers
    if count in layers:
        raise UserError(
            f"{', '.join(eagle_heads_of(spec))}: a head reads what the target's output layer reads,"
            " as EAGLE-1 heads do; a server does not give that"
        )
    return layers


def _check_features(server: AnswerServer, layers: Sequence[int], width: int) -> None:
    """Raises :class:`UserError` unless the server gives hidden states of that many layers."""
    _, features = server.complete_with_features(server.least, 1)
    if features.shape[1] != len(layers) * width:
        numbers = ", ".join(map(str, layers))
        raise UserError(
            f"{server.url}: gives {features.shape[1]} values of hidden states for a token; the"
            f" layers {numbers}, which the drafts read, have {len(layers)} × {width}"
        )


def answers_to(
    server: AnswerServer, asked: ShardPrompt, max_new_tokens: int, features: bool
) -> list[Answer]:
    """The answers to every turn of a prompt, with their `features` or without. Later turns follow
    the server's answers."""
    conversation = Conversation(asked.prompt, server.tokenizer)
    texts: list[str] = []
    found: list[Answer] = []
    for turn, number in enumerate(asked.numbers, 1):
        tokens = conversation.tokens(texts)
        output, states = (
            server.complete_with_features(tokens, max_new_tokens)
            if features
            else (server.complete(tokens, max_new_tokens), None)
        )
        texts.append(conversation.answer(output))
        name = turn_id(asked.prompt.id, turn)
        found.append(Answer(Request(name, tokens, max_new_tokens, seed=number), output, states))
    return found


@contextmanager
def asking(
    server: AnswerServer,
    clients: int,
    shards: Mapping[int, Batch],
    max_new_tokens: int,
    features: bool = False,
) -> Iterator[Callable[[int], list[Answer]]]:
    """Send the prompts of some shards to the server in order, `clients` at a time. Yields a
    function that waits for the answers to a shard, with their `features` or without. The shards are
    to be taken in order; only some prompts are sent ahead.

    At the end no further prompt is sent, and answers under way are not waited for: the threads are
    daemons, which an executor's threads are not."""
    asked: dict[int, list[Future[list[Answer]]]] = {}
    waiting: SimpleQueue[tuple[Future[list[Answer]], ShardPrompt]] = SimpleQueue()
    # The answers wait in memory until a shard is taken, perhaps with features.
    room = Semaphore(_AHEAD * clients + max(map(len, shards.values()), default=0))
    for number, batch in shards.items():
        asked[number] = [Future() for _ in batch]
        for pair in zip(asked[number], batch, strict=True):
            waiting.put(pair)

    def work() -> None:
        with suppress(Empty):
            while True:
                room.acquire()
                future, prompt = waiting.get_nowait()
                try:
                    future.set_result(answers_to(server, prompt, max_new_tokens, features))
                except Exception as error:  # raised where the answer is waited for
                    future.set_exception(error)

    def taken(number: int) -> list[Answer]:
        answers = [each for one in asked.pop(number) for each in one.result()]
        room.release(len(shards[number]))
        return answers

    for _ in range(clients):
        Thread(target=work, daemon=True).start()
    try:
        yield taken
    finally:
        with suppress(Empty):
            while True:
                waiting.get_nowait()
        room.release(clients)  # they end


def check_answers(server: AnswerServer, folder: Path, max_new_tokens: int) -> None:
    """Raises :class:`UserError` where the server now answers the first prompt of a recording with
    other tokens. The first 8 tokens are compared. Later tokens may differ with the same model:
    rounding depends on the requests in a batch."""
    for number in shards(folder)[:1]:
        table = read_table(shard_file(folder, PROMPTS, number), ["id", "tokens", "output"])
        [first] = table.slice(0, 1).to_pylist()
        answer = server.complete(first["tokens"], max_new_tokens)
        if answer[:_COMPARED] != first["output"][:_COMPARED]:
            raise UserError(
                f"{server.url}: answers prompt {first['id']} otherwise than in {folder}; give"
                " another --name"
            )


def served_pair(spec: PairSpec, drafts: bool = False, heads: bool = False) -> Pair:
    """A pair with a target without weights; with `drafts`, its drafts are loaded, with `heads` or
    without. Sets this process's torch threads. Raises :class:`UserError` for a missing model."""
    torch.set_num_threads(spec.runner.threads)
    tokenizer = check_pair(spec, served=True)
    if spec.runner.target_dtype == "auto":  # no forward of the target is timed here
        stored = str(load_config(spec.target).dtype or torch.float32).removeprefix("torch.")
        spec = spec.with_runner(target_dtype=stored)
    spec = resolve_dtypes(spec)
    target = load_skeleton(spec.target).to(getattr(torch, spec.runner.target_dtype))
    loaded = load_drafts(spec, target if heads else None) if drafts else {}
    return Pair(spec, tokenizer, target, loaded)
