"""What to record, and what of it is on disk: shards of a few prompts each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt

from specdec_core.base.errors import UserError
from specdec_core.base.names import check_name, digest_name
from specdec_core.config import PairSpec, Sampling, Value
from specdec_core.models.pair import check_pair, eagle_heads_of, max_length_of, short_drafts
from specdec_core.prompts.conversation import Conversation, conversations
from specdec_core.prompts.prompt_sets import Prompt, PromptSet
from specdec_core.prompts.source import PromptSource
from specdec_core.recordings.find import finished
from specdec_core.recordings.schema import (
    DRAFTS,
    EXAMPLES,
    HEADER,
    PROMPTS,
    Header,
    RecordedSampling,
    Recording,
    read_table,
    shard_file,
    shards,
)

SHARD = 8  # prompts: the most that a killed recording loses for each process
_ANSWERS = 64  # prompts: the same, where nothing is recorded but a target's answers
_SHARDS = 16  # at least, before shards have more prompts than SHARD


@dataclass(frozen=True)
class ShardPrompt:
    """A prompt to record: the numbers of its turns in the prompt set, and the tokens of its first
    turn. Later turns follow the target's answers."""

    numbers: range
    prompt: Prompt
    tokens: tuple[int, ...]


Batch = list[ShardPrompt]  # a shard's prompts


class RecordingPlan(Value):
    """What to record."""

    pair: PairSpec = PairSpec()
    prompts: PromptSource = PromptSource(source="bundled:train")
    max_new_tokens: PositiveInt = 128
    sampling: RecordedSampling = Sampling()
    max_draft: PositiveInt = Header.model_fields["max_draft"].default
    continuations: bool = True
    top_k: PositiveInt = Header.model_fields["top_k"].default
    mixing: float = Field(default=Header.model_fields["mixing"].default, ge=0, lt=1)
    served: str | None = Field(
        default=None, description="the model of a server whose answers are recorded"
    )

    def name(self, fingerprints: Mapping[str, str], prompts: PromptSet) -> str:
        """The pair's name, and a digest of the weights, the prompts and the settings: a recording
        depends on all of them."""
        runner = self.pair.runner
        settings = self.model_dump(mode="json", exclude={"pair", "prompts"})
        if self.served is None:  # a recording of the target keeps its name
            del settings["served"]
        types = [runner.device, runner.target_dtype, runner.draft_dtype]
        if runner.compile:
            types.append("compile")
        if short := short_drafts(self.pair):
            types.append(json.dumps(short, sort_keys=True))
        content = json.dumps([settings, types, dict(fingerprints), prompts.digest], sort_keys=True)
        return f"{self.pair.name}-{digest_name(content)[:8]}"

    def header(
        self, pair: PairSpec, fingerprints: dict[str, str], prompts: PromptSet, eos: Iterable[int]
    ) -> Header:
        """The header of a recording by this plan."""
        return Header(
            pair=pair,
            fingerprints=fingerprints,
            eos_token_ids=tuple(sorted(eos)),
            prompts=prompts,
            eagle_heads=eagle_heads_of(pair),
            short_drafts=short_drafts(pair),
            **self.model_dump(exclude={"pair", "prompts"}),
        )


@dataclass(frozen=True)
class PlannedRecording:
    """A recording to be made or resumed in `folder`: its shards by number, and the header on disk,
    if any."""

    plan: RecordingPlan
    folder: Path
    fingerprints: dict[str, str]
    prompts: PromptSet
    batches: dict[int, Batch]
    header: Header | None

    @property
    def pair(self) -> PairSpec:
        """The plan's pair, with the device and data types of a recording that was begun."""
        return self.plan.pair if self.header is None else typed(self.plan.pair, self.header)

    @property
    def finished(self) -> bool:
        """Whether the whole recording is on disk."""
        if self.header is None or not finished(self.folder):
            return False
        return not self.missing(self.header)

    def missing(self, header: Header) -> dict[int, Batch]:
        """The shards that are not whole on disk."""
        on_disk = set(shards(self.folder))
        return {
            number: batch
            for number, batch in self.batches.items()
            if number not in on_disk or not _whole(self.folder, number, header, batch)
        }


def planned(
    plan: RecordingPlan,
    home: Path,
    fingerprints: Callable[[PairSpec], dict[str, str]],
    name: str | None = None,
    out: Path | None = None,
) -> PlannedRecording:
    """The recording of `plan` in `out`, or else in `<home>/traces/<name>`. The default name depends
    on weights, prompts and settings, so the same call resumes its recording. Prompts of the same
    text are recorded once. Every turn of a conversation is recorded after the target's own greedy
    answers (:func:`specdec_core.engine.turns.requests_of`), or after a server's.

    Raises :class:`UserError` for bad input; nothing is written.
    """
    check_name(name)
    tokenizer = check_pair(plan.pair, served=plan.served is not None)
    prompts = plan.prompts.load(tokenizer)
    prompt_set = plan.prompts.described(prompts)
    prints = fingerprints(plan.pair)
    folder = out or home / "traces" / (name or plan.name(prints, prompt_set))
    header = _begun(folder, plan, prints, prompt_set)
    alone = not plan.pair.drafts and plan.served is None
    batches = _batches(prompts, tokenizer, _ANSWERS if alone else SHARD)
    wanted = PlannedRecording(plan, folder, prints, prompt_set, batches, header)
    if not wanted.finished:
        # Raises for a prompt that is too long for the models, or empty.
        conversations(prompts, tokenizer, plan.max_new_tokens, max_length_of(plan.pair))
    return wanted


def parts_of(header: Header) -> list[str]:
    """The parts that a shard may have, each a file."""
    of_drafts = (f"{part}/{draft}" for draft in header.pair.drafts for part in (DRAFTS, EXAMPLES))
    return [PROMPTS, *of_drafts]


def count_turns(batches: Iterable[Batch]) -> int:
    """The turns in some shards."""
    return sum(len(asked.numbers) for batch in batches for asked in batch)


def _begun(
    folder: Path, plan: RecordingPlan, prints: dict[str, str], prompts: PromptSet
) -> Header | None:
    """The header in `folder`, if any. Raises :class:`UserError` for another recording's folder."""
    if not (folder / HEADER).exists():
        if folder.is_dir() and any(not f.name.startswith(".") for f in folder.iterdir()):
            raise UserError(f"{folder}: holds other files; a recording needs a folder of its own")
        return None
    header = Recording.open(folder).header
    if header.served != plan.served:
        recorded, asked = (
            model or "the target's weights" for model in (header.served, plan.served)
        )
        raise UserError(
            f"{folder} has the answers of {recorded}, not of {asked}; give another --name"
        )
    expected = plan.header(typed(plan.pair, header), prints, prompts, header.eos_token_ids)
    differing = [
        field
        for field in Header.model_fields
        if field not in ("pair", "prompts") and getattr(header, field) != getattr(expected, field)
    ]
    if list(header.pair.drafts) != list(plan.pair.drafts):
        differing.append("drafts")
    if header.prompts.digest != prompts.digest:
        differing.append("prompts")
    for field in ("device", "target_dtype", "draft_dtype", "compile"):
        if getattr(plan.pair.runner, field) not in ("auto", getattr(header.pair.runner, field)):
            differing.append(field)
    if differing:
        raise UserError(
            f"{folder} holds another recording (other {', '.join(differing)}); give another --name"
        )
    return header


def typed(pair: PairSpec, header: Header) -> PairSpec:
    """`pair` with the device and data types of a recording."""
    types = ("device", "target_dtype", "draft_dtype")
    return pair.with_runner(**{name: getattr(header.pair.runner, name) for name in types})


def _batches(prompts: Sequence[Prompt], tokenizer: Any, most: int) -> dict[int, Batch]:
    """The shards by number, with one prompt for each text. Shards have up to `most` prompts, if
    that leaves a shard for each of several processes."""
    chosen: dict[tuple[object, ...], ShardPrompt] = {}
    number = 0
    for prompt in prompts:
        asked = Conversation(prompt, tokenizer)
        numbers = range(number, number := number + asked.turns)
        text = (prompt.text, prompt.template, prompt.turns[1 : asked.turns])
        if text not in chosen:
            chosen[text] = ShardPrompt(numbers, prompt, asked.tokens())
    every = list(chosen.values())
    size = max(SHARD, min(most, len(every) // _SHARDS))
    starts = range(0, len(every), size)
    return {number: every[start : start + size] for number, start in enumerate(starts)}


def _whole(folder: Path, number: int, header: Header, batch: Batch) -> bool:
    """Whether a shard's files can be read and hold the prompts of `batch`."""

    def read(part: str, *columns: str) -> list[np.ndarray]:
        table = read_table(shard_file(folder, part, number), list(columns))
        return [table[column].to_numpy() for column in columns]

    try:
        table = read_table(shard_file(folder, PROMPTS, number), ["prompt", "tokens", "output"])
        rows = zip(table["prompt"].to_pylist(), table["tokens"].to_pylist(), strict=True)
        recorded = dict(rows)
        numbers = [n for asked in batch for n in asked.numbers]
        if list(recorded) != numbers:
            return False
        if any(recorded[asked.numbers[0]] != list(asked.tokens) for asked in batch):
            return False
        lengths = [len(output) for output in table["output"].to_pylist()]
        expected = np.repeat(numbers, lengths)
        found = []
        for draft in header.pair.drafts:
            prompt, step = read(f"{DRAFTS}/{draft}", "prompt", "step")
            found.append(prompt[step == 0])
            if header.mixing and draft not in header.eagle_heads:  # examples are of draft models
                found += read(f"{EXAMPLES}/{draft}", "prompt")
        return all(np.array_equal(prompts, expected) for prompts in found)
    except UserError:
        return False
