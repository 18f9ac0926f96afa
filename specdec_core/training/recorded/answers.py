"""What trainings read: a target's own answers to prompts.

They are written once, in shards of a fixed number of prompts, and every training reads them. The
same call, interrupted, resumes after the last complete shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path, write_atomically
from specdec_core.config import AUTOREGRESSIVE, Document, Sampling, load_yaml, parse
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation

SHARD = 256  # prompts
_CARD = "answers.json"
_TOKENS = pa.list_(pa.int32())
_SCHEMA = pa.schema([("id", pa.string()), ("prompt", _TOKENS), ("answer", _TOKENS)])
_STEP_TOKENS = 512  # large: throughput counts here, not latency

TokenPrompt = tuple[str, tuple[int, ...]]  # an id and its tokens


class AnswersCard(Document):
    """What the shards in a folder hold. Prompt number n is answered at temperature
    `temperatures[n % len(temperatures)]`, with seed n."""

    target: str
    fingerprint: str
    prompts: int
    digest: str  # of the prompts' tokens
    max_new_tokens: int
    temperatures: tuple[float, ...]

    @property
    def identity(self) -> str:
        """The same for the same answers, wherever they and their target are."""
        content = self.model_dump_json(exclude={"target"})
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and the target's answer at a temperature, as tokens."""

    id: str
    prompt: list[int]
    answer: list[int]
    temperature: float


def write_answers(
    pair: Pair,
    prompts: Sequence[TokenPrompt],
    card: AnswersCard,
    folder: Path,
    slots: int,
    on_finish: Callable[[Generation], None] | None = None,
) -> None:
    """Have the target of `pair` answer `prompts`, up to `slots` of them at a time.

    Raises:
        UserError: the folder holds other answers, or a prompt does not fit.
    """
    claim(folder, card)
    shards = range(0, len(prompts), SHARD)
    missing = [first for first in shards if not _path(folder, first).exists()]
    engine = Engine(pair, AUTOREGRESSIVE, limits=Limits(slots, step_tokens=_STEP_TOKENS))
    left: dict[int, int] = {}
    for first in missing:
        numbers = range(first, min(first + SHARD, len(prompts)))
        left[first] = len(numbers)
        for number in numbers:
            temperature = card.temperatures[number % len(card.temperatures)]
            engine.add(
                Request(
                    str(number),
                    prompts[number][1],
                    card.max_new_tokens,
                    Sampling(temperature=temperature),
                    seed=number,
                )
            )
    done: dict[int, Generation] = {}
    while not engine.idle:
        for chunk in engine.step(texts=False):
            if chunk.finished is None:
                continue
            number = int(chunk.request_id)
            done[number] = chunk.finished
            first = number // SHARD * SHARD
            left[first] -= 1
            if not left[first]:
                numbers = range(first, min(first + SHARD, len(prompts)))
                rows = [
                    {"id": prompts[n][0], "prompt": prompts[n][1], "answer": done.pop(n).tokens}
                    for n in numbers
                ]
                with atomic_path(_path(folder, first)) as path:
                    parquet.write_table(pa.Table.from_pylist(rows, _SCHEMA), path)
            if on_finish:
                on_finish(chunk.finished)


def answer_shards(folder: Path) -> list[int]:
    """The numbers of the shards in a folder, increasing."""
    return sorted(int(path.stem) for path in folder.glob("*.parquet"))


def read_shard(folder: Path, shard: int) -> list[RecordedAnswer]:
    """The answers in a shard. Raises :class:`UserError` where the folder has no card."""
    temperatures = read_card(folder).temperatures
    rows = parquet.read_table(_path(folder, shard * SHARD)).to_pylist()
    return [
        RecordedAnswer(**row, temperature=temperatures[number % len(temperatures)])
        for number, row in enumerate(rows, start=shard * SHARD)
    ]


def read_card(folder: Path) -> AnswersCard:
    """What is in a folder of answers. Raises :class:`UserError` where there is none."""
    path = folder / _CARD
    return parse(AnswersCard, load_yaml(path), str(path))


def claim(folder: Path, card: AnswersCard) -> None:
    """Reserve `folder` for these answers. Raises :class:`UserError` if it holds different ones."""
    path = folder / _CARD
    if path.exists():
        if read_card(folder) != card:
            raise UserError(f"{folder}: holds other answers ({_CARD} differs); name another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, card.model_dump_json(indent=1))


def _path(folder: Path, first: int) -> Path:
    return folder / f"{first // SHARD:05d}.parquet"
