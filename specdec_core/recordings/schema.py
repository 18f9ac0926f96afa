"""The contents of a recording, and its files.

    recording.json               what was recorded (:class:`Header`)
    drafts/<draft>/shard-N       one row a drafted token (:data:`EVERY_ROW` and the like)
    examples/<draft>/shard-N     rows to train acceptance heads on (:data:`EXAMPLE`)
    prompts/shard-N              prompts and the target's outputs; written last: the shard is whole
    decoded/*.parquet            rounds decoded live (:mod:`specdec_core.search.load.decoded`)

Shards are Parquet files of some prompts each, written whole or not at all.

A prompt's first rows are the target's trajectory (step 0), one for each of its N generated
positions t: the token Y_t that the draft model drafts after the prompt and X_0 … X_{t-1}. Then
follows, for each position where Y_t is not X_t, the continuation (step 1, 2, …): what is drafted
after Y_t, up to `max_draft` tokens including Y_t, or to an end token. A head drafts otherwise after
its own tokens than after a sequence that the target has read, so its continuations follow from
every position. Where the sequence has more tokens than a draft has positions, Y_t is
:data:`NOTHING`, the draft's other columns mean nothing, and no continuation follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator, Field, model_validator

from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.files import atomic_path, write_atomically
from specdec_core.config import PairSpec, Sampling, Value, parse_json
from specdec_core.models.fingerprints import TARGET
from specdec_core.prompts.conversation import conversation_of
from specdec_core.prompts.prompt_sets import PromptSet

HEADER = "recording.json"
NOTHING = -1  # as a draft's token: none is drafted there
PROMPTS, DRAFTS, EXAMPLES = "prompts", "drafts", "examples"

# Columns that every row of a draft has …
EVERY_ROW = {
    "prompt": pa.int32(),  # number in the prompt set
    "position": pa.int32(),  # t; of a continuation, that of its Y_t
    "step": pa.int16(),
    "draft_token": pa.int32(),
    "entropy": pa.float32(),  # of q, nats
    "top_probability": pa.float32(),  # max q
    "probability": pa.float32(),  # q(draft_token)
}
# … and those that only the trajectory has (p: the target's distribution, q: the draft's).
TRAJECTORY_ONLY = {
    "target_token": pa.int32(),  # X_t
    "rank": pa.int32(),  # of X_t under q, 0 the most likely
    "target_probability": pa.float32(),  # p(X_t)
    "draft_token_target_probability": pa.float32(),  # p(draft_token)
    "overlap": pa.float32(),  # β = Σ min(p, q)
    "cross_entropy": pa.float32(),  # H_{q,p} = − Σ q log p, nats
    "target_entropy": pa.float32(),  # of p, nats
}

# Columns that need the target's logits. They are null in a recording of a server's answers.
OF_LOGITS = frozenset(TRAJECTORY_ONLY) - {"target_token", "rank"}

# Columns of the examples, one row a generated position t. Z mixes the target's tokens X and the
# draft's Y (SpecDec++, §4.4).
EXAMPLE = {
    "prompt": pa.int32(),
    "position": pa.int32(),
    "acceptance": pa.float32(),  # min(1, p(Y_t)/q(Y_t)); whether Y_t is X_t where output is fixed
    "y_accepted": pa.bool_(),
    "from_draft": pa.bool_(),  # Z_t is Y_t: only there a loss
}  # and hidden, the state of Z_t: what the output layer reads once Z_0 … Z_t were fed


def _recordable(sampling: Sampling) -> Sampling:
    if sampling.edits_logits:
        raise ValueError(
            "penalties and logit_bias cannot be recorded: what a draft would do depends on the text"
            " before it; configurations with them are run live"
        )
    return sampling


RecordedSampling = Annotated[Sampling, AfterValidator(_recordable)]


class Header(Value):
    """What was recorded, and from which weights."""

    version: Literal[1] = 1
    pair: PairSpec  # with concrete device and data types
    fingerprints: dict[str, str]  # of the target's and the drafts' weights
    eos_token_ids: tuple[int, ...]
    prompts: PromptSet
    sampling: RecordedSampling = Sampling()
    max_new_tokens: int = Field(ge=1)
    max_draft: int = Field(default=20, ge=1, description="the longest draft that can be replayed")
    continuations: bool = Field(default=True, description="what is drafted after disagreements")
    top_k: int = Field(default=10, ge=1, description="largest probabilities kept of each q")
    mixing: float = Field(
        default=0.15,
        ge=0,
        lt=1,
        description="share of target tokens in the examples; 0, no examples",
    )

    eagle_heads: tuple[str, ...] = Field(default=(), description="the drafts that are EAGLE heads")
    short_drafts: dict[str, int] = Field(
        default={}, description="positions of the drafts that have fewer than the target"
    )
    served: str | None = Field(
        default=None, description="the model of the server that gave the outputs; null: none did"
    )

    @model_validator(mode="after")
    def _check_fingerprints(self) -> Self:
        models = (TARGET, *self.pair.drafts)
        if missing := [model for model in models if model not in self.fingerprints]:
            raise ValueError(f"fingerprints: none of {', '.join(missing)}")
        return self

    @property
    def replayable(self) -> bool:
        """Whether every draft length can be replayed."""
        return self.continuations and self.sampling.fixed_output


Shard = Mapping[str, pa.Table]  # by folder: prompts, drafts/<draft>, examples/<draft>


def save_header(header: Header, folder: Path) -> Path:
    return write_atomically(folder / HEADER, header.model_dump_json(indent=1) + "\n")


def shard_file(folder: Path, part: str, number: int) -> Path:
    return folder / part / f"shard-{number:05}.parquet"


def write_shard(shard: Shard, folder: Path, number: int) -> None:
    """Write the tables of a shard, each whole, the prompts last."""
    for part in sorted(shard, key=lambda part: part == PROMPTS):
        with atomic_path(shard_file(folder, part, number)) as path:
            # Floats hardly repeat: their bytes, sorted by place, compress better than a dictionary.
            table = shard[part]
            integers = [
                f.name
                for f in table.schema
                if not pa.types.is_floating(getattr(f.type, "value_type", f.type))
            ]
            vectors = [
                f"{n}.list.element" for n in ("hidden", "top_probs") if n in table.schema.names
            ]
            pq.write_table(
                table,
                path,
                compression="zstd",
                use_dictionary=integers,
                use_byte_stream_split=vectors,
            )


def shards(folder: Path) -> list[int]:
    """The numbers of the whole shards."""
    numbers = (file.stem.removeprefix("shard-") for file in folder.glob("prompts/shard-*.parquet"))
    return sorted(int(number) for number in numbers if number.isdigit())  # none of a copied file


def read_table(file: Path, columns: list[str] | None = None) -> pa.Table:
    """A Parquet file; raises :class:`UserError` for one that is missing or not whole."""
    try:
        return pq.read_table(file, columns=columns)
    except FileNotFoundError:
        raise UserError(f"{file}: missing from the recording; record it again") from None
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        reason = str(error).splitlines()[0].strip()
        raise UserError(f"{file}: not a whole Parquet file ({reason}); record it again") from None


@dataclass(frozen=True)
class Recording:
    """A recording on disk."""

    folder: Path
    header: Header

    @classmethod
    def open(cls, folder: str | Path) -> Recording:
        """Raises :class:`UserError` where `folder` holds no recording of this version."""
        folder = Path(folder)
        file = folder / HEADER
        try:
            header = parse_json(Header, file.read_bytes(), f"{file}: not a recording's header")
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{folder}: no recording in it ({HEADER} is missing)") from None
        except OSError as error:
            raise UserError(f"{file}: {os_reason(error)}") from None
        return cls(folder, header)

    @property
    def digest(self) -> str:
        """Names what it holds, wherever it is."""
        content = f"{self.header.model_dump_json()} {shards(self.folder)}"
        return hashlib.sha256(content.encode()).hexdigest()

    def check(self, fingerprints: Mapping[str, str]) -> None:
        """Raises :class:`UserError` when the recording is not of the models with these
        fingerprints. Drafts that were not recorded are left out."""
        for name, current in fingerprints.items():
            recorded = self.header.fingerprints.get(name, current)
            if recorded != current:
                raise UserError(
                    f"{self.folder}: recorded from other weights of {name} "
                    f"({recorded[:8]}, now {current[:8]}); record it again"
                )

    def draft_name(self, draft: str | None = None) -> str:
        """A recorded draft; the first one unless named. Raises :class:`UserError`."""
        names = list(self.header.pair.drafts)
        if not names:
            raise UserError(f"{self.folder}: recorded without a draft; record with --draft")
        draft = names[0] if draft is None else draft
        if draft not in names:
            known = ", ".join(names)
            raise UserError(f"{self.folder}: no draft {draft!r} was recorded (it has: {known})")
        return draft

    def table(self, part: str, columns: list[str] | None = None) -> pa.Table:
        """A part of all shards: `prompts`, `drafts/<draft>` or `examples/<draft>`. Raises
        :class:`UserError` for files that are missing or broken."""
        files = [shard_file(self.folder, part, number) for number in shards(self.folder)]
        if not files:
            raise UserError(f"{self.folder}: nothing was recorded in it yet")
        return pa.concat_tables([read_table(file, columns) for file in files])

    def examples(self, draft: str | None = None) -> pa.Table:
        """The rows (:data:`EXAMPLE`) to train an acceptance head of `draft` on. Raises
        :class:`UserError` when none were recorded."""
        if not self.header.mixing:
            raise UserError(f"{self.folder}: recorded without examples; record with --mixing 0.15")
        draft = self.draft_name(draft)
        if draft in self.header.eagle_heads:
            raise UserError(
                f"{self.folder}: {draft} is an EAGLE head, of which no token-mixed examples are"
                " recorded; train other --kinds for it, or heads of another --draft"
            )
        return self._dense(f"{EXAMPLES}/{draft}")

    @cached_property
    def prompts(self) -> RecordedPrompts:
        table = self.table(PROMPTS, ["prompt", "id", "tokens", "output"])
        tokens, outputs = (
            [np.asarray(row, dtype=np.int32) for row in table[name].to_pylist()]
            for name in ("tokens", "output")
        )
        return RecordedPrompts(
            table["prompt"].to_pylist(), table["id"].to_pylist(), tokens, outputs
        )

    def trace(self, draft: str | None = None, hidden: bool = True) -> Trace:
        """All rows of a draft, with or without the `hidden` states, most of a recording. Raises
        :class:`UserError` where they are not of the recorded outputs."""
        name = self.draft_name(draft)
        part = f"{DRAFTS}/{name}"
        columns = [*EVERY_ROW, *TRAJECTORY_ONLY, "top_probs", *(["hidden"] if hidden else [])]
        table = self._dense(part, columns)
        arrays = {name: _numpy(table[name]) for name in table.column_names}
        trace = Trace(self.header, self.prompts, arrays, self.header.short_drafts.get(name))
        if trace.lengths.tolist() != [len(output) for output in self.prompts.outputs]:
            raise self._mixed(part)
        return trace

    def _dense(self, part: str, columns: list[str] | None = None) -> pa.Table:
        """A part with its prompts numbered by their place in `prompts`, without gaps."""
        table, numbers = self.table(part, columns), np.asarray(self.prompts.numbers)
        rows, order = table["prompt"].to_numpy(), np.argsort(numbers)
        if not np.isin(rows, numbers).all():
            raise self._mixed(part)
        dense = order[np.searchsorted(numbers[order], rows)]
        place = table.column_names.index("prompt")
        return table.set_column(place, "prompt", pa.array(dense.astype(np.int32)))

    def _mixed(self, part: str) -> UserError:
        return UserError(
            f"{self.folder / part}: not of the same prompts and outputs as {self.folder / PROMPTS};"
            " record it again"
        )


@dataclass(frozen=True)
class RecordedPrompts:
    """The recorded prompts, in the order of the rows."""

    numbers: list[int]  # in the prompt set
    ids: list[str]
    tokens: list[np.ndarray]
    outputs: list[np.ndarray]  # the target's

    @cached_property
    def first_turns(self) -> list[np.ndarray]:
        """Of each prompt the tokens that its conversation begins with; of a first turn its own."""
        begun: dict[str, np.ndarray] = {}
        found = []
        for name, tokens in zip(self.ids, self.tokens, strict=True):
            conversation = conversation_of(name)
            if conversation == name:
                begun[name] = tokens
            found.append(begun.setdefault(conversation, tokens))
        return found

    @property
    def context(self) -> int:
        """Tokens in the cache half-way through the outputs, on average."""
        lengths = zip(self.tokens, self.outputs, strict=True)
        return sum(len(prompt) + len(output) // 2 for prompt, output in lengths) // len(self.tokens)


@dataclass(frozen=True)
class Trace:
    """One draft model along the target's trajectories: R drafted tokens of P prompts, in the order
    described in :mod:`specdec_core.recordings.schema`, as columns.

    Columns are attributes, of shape (R,); top_probs (R, top_k); hidden (R, dimension), where
    loaded. `prompt` counts the recorded prompts from 0. `positions` are the draft's, where these
    may be fewer than a sequence's tokens.
    """

    header: Header
    prompts: RecordedPrompts
    columns: dict[str, np.ndarray]
    positions: int | None = None

    def __getattr__(self, name: str) -> np.ndarray:
        if name != "columns" and name in self.columns:
            if name in OF_LOGITS and self.header.served is not None:
                raise UserError(
                    f"{name} needs the target's logits, and the recording has the answers of the"
                    f" server's {self.header.served}: record with the target's weights"
                )
            return self.columns[name]
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def trajectory(self) -> np.ndarray:
        """The rows of step 0 (T,), T = ΣN."""
        return np.flatnonzero(self.step == 0)

    @cached_property
    def drafted(self) -> np.ndarray:
        """The rows of step 0 that have a token of the draft's (up to T,)."""
        return np.asarray(self.trajectory[self.draft_token[self.trajectory] != NOTHING])

    @cached_property
    def lengths(self) -> np.ndarray:
        """N, the generated tokens, of each prompt (P,)."""
        return np.bincount(self.prompt[self.trajectory], minlength=len(self.prompts.ids))

    @cached_property
    def agrees(self) -> np.ndarray:
        """Whether the draft's token is the target's, along the trajectories (T,)."""
        rows = self.trajectory
        return np.asarray(self.draft_token[rows] == self.target_token[rows])


def _numpy(column: pa.ChunkedArray) -> Any:
    column = column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, column.type.list_size)
    if column.null_count and pa.types.is_integer(column.type):
        column = column.fill_null(-1)
    return column.to_numpy(zero_copy_only=False)
