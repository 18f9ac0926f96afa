"""A server's greedy answers, to be recorded in the place of a target's output.

The target's tokenizer and configuration are on this machine; its weights need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from pydantic import PositiveInt

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, Value
from specdec_core.engine import Request
from specdec_core.models.loading import load_config, load_skeleton
from specdec_core.models.pair import Pair, check_pair, eagle_heads_of, load_drafts, resolve_dtypes
from specdec_core.prompts.conversation import Conversation, turn_id
from specdec_core.recordings.plan import Batch, RecordingPlan, ShardPrompt
from specdec_core.recordings.schema import PROMPTS, read_table, shard_file, shards
from specdec_core.servers.completions import AnswerServer

# Requests, with the answer to each.
Answers = list[tuple[Request, list[int]]]
_COMPARED = 8  # tokens of an answer that must be the same when a recording is resumed


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
    if heads := eagle_heads_of(plan.pair):
        raise UserError(
            f"--server: draft {heads[0]} is an EAGLE head, which reads the target's hidden states;"
            " a server does not give them"
        )
    tokenizer = check_pair(plan.pair, served=True)
    target = Pair(plan.pair, tokenizer, load_skeleton(plan.pair.target))
    return AnswerServer(address.url, tokenizer, target.eos_token_ids, address.model)


def answers_to(server: AnswerServer, asked: ShardPrompt, max_new_tokens: int) -> Answers:
    """The answers to every turn of a prompt. Later turns follow the server's answers."""
    conversation = Conversation(asked.prompt, server.tokenizer)
    texts: list[str] = []
    found: Answers = []
    for turn, number in enumerate(asked.numbers, 1):
        tokens = conversation.tokens(texts)
        output = server.complete(tokens, max_new_tokens)
        texts.append(conversation.answer(output))
        name = turn_id(asked.prompt.id, turn)
        found.append((Request(name, tokens, max_new_tokens, seed=number), output))
    return found


@contextmanager
def asking(
    server: AnswerServer, clients: int, shards: Mapping[int, Batch], max_new_tokens: int
) -> Iterator[Callable[[int], Answers]]:
    """Send the prompts of some shards to the server in order, `clients` at a time. Yields a
    function that waits for the answers to a shard.

    At the end no further prompt is sent, and answers under way are not waited for: the threads are
    daemons, which an executor's threads are not."""
    asked: dict[int, list[Future[Answers]]] = {}
    waiting: SimpleQueue[tuple[Future[Answers], ShardPrompt]] = SimpleQueue()
    for number, batch in shards.items():
        asked[number] = [Future() for _ in batch]
        for pair in zip(asked[number], batch, strict=True):
            waiting.put(pair)

    def work() -> None:
        with suppress(Empty):
            while True:
                future, prompt = waiting.get_nowait()
                try:
                    future.set_result(answers_to(server, prompt, max_new_tokens))
                except Exception as error:  # raised where the answer is waited for
                    future.set_exception(error)

    for _ in range(clients):
        Thread(target=work, daemon=True).start()
    try:
        yield lambda number: [each for one in asked.pop(number) for each in one.result()]
    finally:
        with suppress(Empty):
            while True:
                waiting.get_nowait()


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


def served_pair(spec: PairSpec) -> Pair:
    """The drafts of a pair, loaded, beside a target without weights; sets this process's torch
    threads. Raises :class:`UserError` for a missing model."""
    torch.set_num_threads(spec.runner.threads)
    tokenizer = check_pair(spec, served=True)
    if spec.runner.target_dtype == "auto":  # no forward of the target is timed here
        stored = str(load_config(spec.target).dtype or torch.float32).removeprefix("torch.")
        runner = spec.runner.model_copy(update={"target_dtype": stored})
        spec = spec.model_copy(update={"runner": runner})
    spec = resolve_dtypes(spec)
    target = load_skeleton(spec.target).to(getattr(torch, spec.runner.target_dtype))
    return Pair(spec, tokenizer, target, load_drafts(spec))
