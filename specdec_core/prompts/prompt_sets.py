"""Prompts to measure with: the bundled ones, JSONL and Parquet files in the usual formats, hub data
sets."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from specdec_core.base.errors import UserError, os_reason
from specdec_core.prompts.chat import AUTO, read_messages, rendered
from specdec_core.prompts.prompt import Prompt, PromptSet, digest

__all__ = ["BUNDLED", "FORMATS", "Prompt", "PromptSet", "digest", "file_records", "load_prompts"]

log = logging.getLogger(__name__)

Record = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How a record of a public prompt set is recognised (all of `keys`) and read: its text, which
    of a chat is the user's first or only question. `turns_key` may hold a list of questions that
    are asked one after the other, `messages_key` holds messages of all sides."""

    name: str
    keys: tuple[str, ...]
    text: Callable[[Record], str]
    id_key: str | None = None
    turns_key: str | None = None
    messages_key: str | None = None


def _first_turn(turns: Any) -> Any:
    return turns[0] if isinstance(turns, list) and turns else turns


def _instruction(instruction: str, extra: str | None) -> str:
    return "\n\n".join([instruction, extra] if extra else [instruction])


# The first match wins, so formats with more keys come first.
FORMATS = (
    Format(
        "MT-Bench / Spec-Bench",
        ("turns",),
        lambda r: _first_turn(r["turns"]),
        "question_id",
        turns_key="turns",
    ),
    Format("HumanEval", ("task_id", "prompt"), lambda r: r["prompt"], "task_id"),
    Format("GSM8K", ("question",), lambda r: r["question"]),
    Format(
        "Alpaca seed tasks",
        ("instruction", "instances"),
        lambda r: _instruction(r["instruction"], r["instances"][0]["input"]),
        "id",
    ),
    Format("Alpaca", ("instruction",), lambda r: _instruction(r["instruction"], r.get("input"))),
    Format("plain", ("prompt",), lambda r: _first_turn(r["prompt"]), "id", turns_key="prompt"),
    Format(
        "chat",
        ("messages",),
        lambda r: r["messages"][-1]["content"],
        "id",
        messages_key="messages",
    ),
)

# The public sets' hub ids: which configuration and split holds the prompts.
HUB_SETS = {
    "openai/openai_humaneval": "openai_humaneval/test",
    "openai/gsm8k": "main/test",
    "tatsu-lab/alpaca": "default/train",
    "HuggingFaceH4/mt_bench_prompts": "default/train",
}
# The third, for training heads and policies, is drawn from the seen modules without the second's.
# The last two are requests to an assistant, for chat models: alone, and with a second question.
_FILES = ("chat", "conversations")
BUNDLED = ("bundled:held_out", "bundled:seen", "bundled:train", *(f"bundled:{f}" for f in _FILES))
_FOLDER = Path(__file__).parents[1] / "bundled"
_SOURCES = (
    f"{', '.join(BUNDLED)}, a .jsonl or .parquet file, a folder of such files, a hub data set"
    " (owner/name), or several of these with a comma between each two"
)
# What SPEED-Bench (nvidia/SPEED-Bench) has in place of the texts that it may not hand on.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


def load_prompts(
    source: str, limit: int | None = None, tokenizer: Any = None, chat_template: str = AUTO
) -> list[Prompt]:
    """The first `limit` prompts of `source`, for the pair's `tokenizer`.

    `source` is one of :data:`BUNDLED` (all but the chats need a tokenizer), the path of a JSONL
    or Parquet file of records in one of :data:`FORMATS` or of a folder of such files, or a data
    set's hub id; or several separated by commas, for an equal mixture.
    `chat_template` is a choice of :func:`specdec_core.prompts.chat.rendered`; without a tokenizer
    nothing is rendered. Bad input is a :class:`UserError` that names the file and line.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the number of prompts must be at least 1 (got {limit})")
    parts = [source] if _exists(source) else [part.strip() for part in source.split(",")]
    if "" in parts:
        raise UserError(f"prompts {source!r}: an empty name; prompts are {_SOURCES}")
    chosen = list(islice(_mixed(parts, tokenizer), limit))
    if not chosen:
        raise UserError(f"{source}: no prompts in it")
    return chosen if tokenizer is None else rendered(chosen, tokenizer, chat_template, source)


def _mixed(sources: Sequence[str], tokenizer: Any) -> Iterator[Prompt]:
    """The prompts of all sources interleaved, as long as each has any. With several sources, a
    prompt without a category gets the name of its source."""
    names = {source: _name_of(source) for source in sources}
    if len(sources) == 1:
        [(source, name)] = names.items()
        yield from _read_source(source, name, tokenizer)
        return
    # Two of one name are called by their places, and two of one place with their suffixes, too.
    places = {source: str(Path(source).parent / Path(source).stem) for source in names}
    for longer in (places, {source: source for source in names}):
        count = Counter(names.values())
        names = {s: longer[s] if count[name] > 1 else name for s, name in names.items()}
    found_in: dict[str, str] = {}
    left = {source: _read_source(source, names[source], tokenizer) for source in sources}
    while left:
        for source in list(left):
            prompt = next(left[source], None)
            if prompt is None:
                del left[source]
                continue
            if (other := found_in.setdefault(prompt.id, source)) != source:
                raise UserError(f"{source}: id {prompt.id!r} is in {other}, too")
            yield replace(prompt, category=prompt.category or names[source])


def _exists(source: str) -> bool:
    try:
        return bool(source) and Path(source).exists()
    except (OSError, ValueError):  # no path: too long, or with a NUL in it
        return False


def _name_of(source: str) -> str:
    return Path(source.removeprefix("bundled:")).stem


def _read_source(source: str, name: str, tokenizer: Any) -> Iterator[Prompt]:
    """Its prompts; those without ids are numbered by `name`."""
    if source.startswith("bundled:"):
        return _read_bundled(source, tokenizer)
    if _exists(source) or source.endswith((".jsonl", ".json", ".parquet")):
        return _read_records(_path_records(Path(source)), name)
    if source.count("/") == 1:
        from specdec_core.prompts.shards import shard_records  # Arrow takes a moment to import

        return _read_records(shard_records(_download(source), source), source)
    raise UserError(f"{source}: no such file; prompts are {_SOURCES}")


def _path_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a file, or of all files of prompts in a folder, by name."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        if not files:
            raise UserError(f"{path}: a folder without .jsonl or .parquet files")
    for file in files:
        if file.suffix == ".parquet":
            from specdec_core.prompts.shards import shard_records  # Arrow takes a moment to import

            yield from shard_records(file)
        else:
            yield from file_records(file)


def _read_bundled(source: str, tokenizer: Any) -> Iterator[Prompt]:
    if source not in BUNDLED:
        known = f"{', '.join(BUNDLED[:-1])} and {BUNDLED[-1]}"
        raise UserError(f"{source}: no such bundled prompts; there are {known}")
    if (name := source.removeprefix("bundled:")) in _FILES:
        return _read_records(file_records(_FOLDER / f"{name}.jsonl"), name)
    if tokenizer is None:
        raise ValueError("the bundled prompts are cut to tokens: pass the pair's tokenizer")
    from specdec_core.prompts.stdlib import SPLITS, resolve_prompts, training_prompts

    if source == "bundled:train":
        return (Prompt(id, text) for id, text in training_prompts(tokenizer))
    [split] = (split for split in SPLITS if source == f"bundled:{split}")
    resolved, skipped = resolve_prompts(split, tokenizer)
    if skipped:
        log.warning("%s: %d prompts left out (%s, …)", source, len(skipped), skipped[0])
    return (Prompt(id, text) for id, text in resolved)


def _read_records(records: Iterable[tuple[str, Any]], name: str) -> Iterator[Prompt]:
    """Recognise each (where it stands, record); records without an id are numbered."""
    first_seen: dict[str, str] = {}
    for number, (where, record) in enumerate(records):
        form = _recognise(record, where)
        record_id = record.get(form.id_key) if form.id_key else None
        prompt = _read(
            record, form, f"{name}/{number}" if record_id is None else str(record_id), where
        )
        if prompt.id in first_seen:
            raise UserError(f"{where}: id {prompt.id!r} again, first at {first_seen[prompt.id]}")
        first_seen[prompt.id] = where
        yield prompt


def _read(record: Record, form: Format, prompt_id: str, where: str) -> Prompt:
    messages = read_messages(record[form.messages_key], where) if form.messages_key else ()
    try:
        text = form.text(record)
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{where}: not a complete {form.name} record") from None
    if not isinstance(text, str):
        raise UserError(f"{where}: the prompt is not a string (read as {form.name})")
    if not text.strip():
        raise UserError(f"{where}: empty prompt")
    if text.startswith(_PLACEHOLDER):
        raise UserError(
            f"{where}: a placeholder of SPEED-Bench, not a prompt: expected the file that its"
            " `specdec_bench/prepare_data.py` writes, which fetches the texts from their sources"
        )
    if not all(map(_encodable, (text, *(message.content for message in messages)))):
        raise UserError(f"{where}: the prompt holds half a surrogate pair, which is no text")
    turns = record[form.turns_key] if form.turns_key else ()
    turns = tuple(turns) if isinstance(turns, list) else ()
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip() or not _encodable(turn):
            raise UserError(f"{where}: turns: expected texts (got {shortened(turn)})")
    category = record.get("category")
    return Prompt(prompt_id, text, None if category is None else str(category), turns, messages)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _recognise(record: Any, where: str) -> Format:
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(record).__name__}")
    for form in FORMATS:
        if all(key in record for key in form.keys):
            return form
    keys = ", ".join(map(str, record)) or "no keys"
    known = "; ".join(f"{form.name} ({', '.join(form.keys)})" for form in FORMATS)
    raise UserError(f"{where}: unknown form with {keys}; known are {known}")


def file_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a JSONL file, each with where it stands (`path:line`). Raises
    :class:`UserError` where there is none or it is malformed."""
    try:
        with path.open(encoding="utf-8-sig") as lines:  # with or without a byte-order mark
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    # With its end, a column after it would be one of the next line.
                    yield where, json.loads(line.rstrip())
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{where}: malformed JSON, {error.msg} at column {error.colno}"
                        " (expected one object a line)"
                    ) from None
                except (ValueError, RecursionError) as error:
                    what = "nested too deep" if isinstance(error, RecursionError) else error
                    raise UserError(f"{where}: cannot be read as JSON: {what}") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read, {os_reason(error)}") from None


def _download(dataset: str) -> Path:
    """The Parquet copy that the hub keeps of every data set, as
    `<configuration>/<split>/0000.parquet`; of a large set that is the first part."""
    from huggingface_hub import snapshot_download

    known = HUB_SETS.get(dataset)
    splits: Sequence[str] = [known] if known else ["*/test", "*/validation", "*/train"]
    try:
        for split in splits:
            pattern = f"{split}/0000.parquet"
            folder = snapshot_download(
                dataset,
                repo_type="dataset",
                revision="refs/convert/parquet",
                allow_patterns=pattern,
            )
            if files := sorted(Path(folder).glob(pattern)):
                return files[0]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{dataset}: no such file, and no data set of that name from the hub: {reason}"
        ) from None
    raise UserError(f"{dataset}: no test, validation or train split on the hub")
