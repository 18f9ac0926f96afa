"""The papers' comparison tables as a plan: a YAML file, checked in full before anything runs.

A table has a row for each method and a column for each prompt set and, with `vary`, each value of
one parameter (λ). Configurations that several tables share are decoded once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specdec_core.base.errors import UserError
from specdec_core.config import (
    Configuration,
    PairSpec,
    Placement,
    Sampling,
    Temperature,
    Value,
    load_yaml,
    overridden,
    parse,
)
from specdec_core.prompts.chat import AUTO, ChatTemplate

TIMED = ("tokens_per_second", "speedup")  # need a clock; all other quantities follow from counts
Quantity = Literal[
    "tokens_per_second",
    "speedup",
    "mat",
    "accepted_per_round",
    "acceptance_rate",
    "path_rate",
    "utilisation",
    "discard_rate",
    "verification_rate",
]
Scalar = int | float | str


class PromptsOf(Value):
    """A prompt set: the first of `source` that is a file, or else the last, which may also be a
    bundled set or one of the hub's; or, as `mix`, prompts of other sets in turn. An `optional` one
    may be missing."""

    source: str | tuple[str, ...] = ()
    mix: tuple[str, ...] = ()
    limit: PositiveInt | None = None
    optional: bool = False
    chat_template: ChatTemplate = AUTO

    @model_validator(mode="after")
    def _one_of_two(self) -> PromptsOf:
        if bool(self.source) == bool(self.mix):
            raise ValueError("give either source or mix")
        if self.mix and self.chat_template != AUTO:
            raise ValueError("the sets that are mixed have a chat_template each")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source


class RecordingNeeded(Value):
    """Recordings of some prompt sets, from which the page's sections are computed."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    sampling: Sampling = Sampling()
    limit: PositiveInt | None = Field(
        default=None, description="prompts of each set; unset, as many as are decoded of it"
    )
    max_new_tokens: PositiveInt | None = Field(default=None, description="unset, the plan's")
    max_draft: PositiveInt = Field(default=40, description="the longest draft that is known")
    mixing: float = Field(
        default=0,
        ge=0,
        lt=1,
        description="with SpecDec++'s examples: the target's share of their tokens (§4.4)",
    )
    learned: bool = Field(default=False, description="to train on: --limit leaves its sets whole")


class PlanRow(Value):
    """A method: a name and a drafter, in which the name of the varied parameter stands for its
    value, and a `head` may be a name of the plan's `heads`. Without a drafter, autoregressive
    decoding. `reported` are the paper's numbers."""

    name: str
    reported: str = ""
    drafter: dict[str, Any] | None = None


class Claim(Value):
    """What a paper says of a table: the best of some rows is ahead of the best of others, in each
    prompt set, with the same sampling, draft and varied value. Rows are patterns of names
    (:mod:`fnmatch`); `paper` are its numbers."""

    of: Annotated[tuple[str, ...], Field(min_length=1)]
    over: Annotated[tuple[str, ...], Field(min_length=1)]
    quantity: Quantity = "speedup"
    paper: str


class Table(Value):
    """A table of a paper, in our terms. With `each_draft`, rows with a draft model are repeated for
    each of the pair's drafts; else they use the one numbered `draft`."""

    title: str
    paper: str
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    columns: Annotated[tuple[Quantity, ...], Field(min_length=1)]
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0,)
    top_k: NonNegativeInt = Field(
        default=0, description="where a temperature is not 0: tokens to sample from; 0, all"
    )
    each_draft: bool = False
    draft: PositiveInt = Field(
        default=1,
        description="which of the pair's drafts; a pair without so many has no such table",
    )
    eagle: bool = Field(
        default=False,
        description="with the pair's first EAGLE head as the draft; a pair without one has no such"
        " table",
    )
    repeats: PositiveInt | None = Field(
        default=None, description="times a prompt is timed for this table; unset, the plan's"
    )
    vary: dict[str, Annotated[tuple[Scalar, ...], Field(min_length=1)]] = Field(
        default={}, max_length=1
    )
    against: str | None = Field(
        default=None, description="a row; how each row below it compares with it is told"
    )
    frontier: bool = Field(
        default=False,
        description="drawn as verification over discard rates, a line a family; with the forward"
        " times that follow from all decodings",
    )
    rows: Annotated[tuple[PlanRow, ...], Field(min_length=1)]
    claim: Claim | None = Field(default=None, description="what the table's verdict is about")
    notes: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        return any(column in TIMED for column in self.columns)

    @property
    def varied(self) -> str | None:
        """The name of the varied parameter."""
        return next(iter(self.vary), None)

    @property
    def values(self) -> tuple[Scalar | None, ...]:
        """The values of the varied parameter; a single None where nothing varies."""
        return next(iter(self.vary.values()), (None,))


@dataclass(frozen=True)
class Method:
    """A line of a table: a configuration for each value of the varied parameter, and the paper's
    numbers for its row."""

    name: str
    configurations: tuple[Configuration, ...]
    reported: str = ""

    @property
    def lossless(self) -> bool:
        return all(configuration.lossless for configuration in self.configurations)

    @property
    def label(self) -> str:
        return self.name if self.lossless else f"{self.name} (lossy)"


class PaperPlan(Value):
    """The tables, and the models and prompts to measure them on."""

    pair: PairSpec = PairSpec()
    prompts: Annotated[dict[str, PromptsOf], Field(min_length=1)]
    max_new_tokens: PositiveInt = 96
    repeats: PositiveInt = Field(default=2, description="times each prompt is decoded and timed")
    heads: dict[str, str] = Field(
        default={}, description="trained heads of the pair by the names that rows have for them"
    )
    tables: Annotated[dict[str, Table], Field(min_length=1)]
    recordings: dict[str, RecordingNeeded] = Field(
        default={}, description="what the page's sections are computed from"
    )
    notes: tuple[str, ...] = ()
    cluster: Placement | None = Field(default=None, description="devices of the models")

    def methods(self, table: str, source: str = "papers") -> list[Method]:
        """The lines of a table; those that need a draft model are left out for a pair without one.
        Raises :class:`UserError`, naming `source` and the key, for a malformed drafter."""
        return [
            method
            for number in range(len(self.tables[table].rows))
            for method in self.lines(table, number, source)
        ]

    def work(self, sets: Sequence[str]) -> dict[str, dict[Configuration, int]]:
        """For each of `sets` the configurations to decode, and how often each is timed; 0 for those
        that are only counted. Includes autoregressive decoding wherever something is timed."""
        work: dict[str, dict[Configuration, int]] = {}
        for key, table in self.tables.items():
            configurations = [c for method in self.methods(key) for c in method.configurations]
            repeats = 0
            if table.timed:
                repeats = min(table.repeats or self.repeats, self.repeats)
                configurations += [Configuration(sampling=c.sampling) for c in configurations]
            for name in table.prompts:
                if name in sets:
                    timed = work.setdefault(name, {})
                    for configuration in configurations:
                        timed[configuration] = max(timed.get(configuration, 0), repeats)
        return work

    def trained_heads(self, table: str, row: int) -> list[tuple[str, str]]:
        """The trained heads of a table's row, each after its draft."""
        first = next(iter(self.pair.drafts), "")
        return list(
            dict.fromkeys(
                (draft or first, head)
                for method in self.lines(table, row)
                for configuration in method.configurations
                for draft, head in configuration.heads
            )
        )

    def check(self, source: str = "papers") -> None:
        """Validate every configuration and reference; raises :class:`UserError`."""
        known = ", ".join(self.prompts)
        for name, prompts in self.prompts.items():
            for part in prompts.mix:
                if part not in self.prompts or self.prompts[part].mix:
                    raise UserError(f"{source}: prompts.{name}.mix: no set {part!r} to mix in")
        for key, recorded in self.recordings.items():
            for name in recorded.prompts:
                if name not in self.prompts or self.prompts[name].mix:
                    raise UserError(
                        f"{source}: recordings.{key}.prompts: no set {name!r} to record"
                    )
        for key, table in self.tables.items():
            if not key or Path(key).name != key or key in (".", ".."):
                raise UserError(f"{source}: tables.{key}: expected a file's name, not a path")
            for name in table.prompts:
                if name not in self.prompts:
                    raise UserError(
                        f"{source}: tables.{key}.prompts: no set {name!r} (there are: {known})"
                    )
            if table.against is not None and table.against not in [r.name for r in table.rows]:
                raise UserError(f"{source}: tables.{key}.against: no row {table.against!r}")
            names = [method.name for method in self.methods(key, source)]
            if again := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"{source}: tables.{key}.rows: {again!r} is there twice")

    def digest(self, prompts: Mapping[str, str]) -> str:
        """A hash of everything that is measured, not of words; `prompts` are the sets' digests."""
        rows = {"__all__": {"reported"}}
        words: Any = {"title": True, "paper": True, "notes": True, "claim": True, "rows": rows}
        exclude: Any = {"recordings": True, "notes": True, "tables": {"__all__": words}}
        if self.cluster is None:
            exclude["cluster"] = True  # results from before there was one are still found
        content = [self.model_dump(mode="json", exclude=exclude), dict(prompts)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def lines(self, key: str, number: int, source: str = "papers") -> Iterator[Method]:
        """The lines of a table's row: for each temperature and, where asked for, each draft."""
        table = self.tables[key]
        row = table.rows[number]
        where = f"{source}: tables.{key}.rows.{number}"
        for temperature in table.temperatures:
            sampling = {"temperature": temperature}
            if temperature:
                sampling["top_k"] = table.top_k
            configurations = []
            for value in table.values:
                drafter = _filled(row.drafter, self.heads, {table.varied: value})
                if row.drafter is not None and not row.drafter:
                    raise UserError(f"{where}.drafter: empty; leave it out to decode without one")
                content = {"drafter": drafter, "sampling": sampling}
                configurations.append(parse(Configuration, content, where))
            suffix = f", T={temperature:g}" if len(table.temperatures) > 1 else ""
            if not any(configuration.drafts for configuration in configurations):
                yield Method(row.name + suffix, tuple(configurations), row.reported)
                continue
            drafts = list(self.pair.drafts)
            if drafts:  # otherwise the row has no methods
                for configuration in configurations:
                    configuration.check_drafts(drafts, where)
            for draft in drafts if table.each_draft else drafts[table.draft - 1 :][:1]:
                named = f", {draft}" if table.each_draft else ""
                complete = tuple(c.with_draft(draft) for c in configurations)
                yield Method(row.name + named + suffix, complete, row.reported)


def _filled(value: Any, heads: Mapping[str, str], varied: Mapping[Any, Any], key: str = "") -> Any:
    """`value` with the path of each of the `heads` for its name, and the value of what is `varied`
    for its name. `key` is what `value` stands under."""
    if isinstance(value, dict):
        return {name: _filled(part, heads, varied, name) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(part, heads, varied) for part in value]
    own = heads.get(value, value) if key == "head" else value
    return varied.get(own, own)


def _extended(path: str | Path, extending: Sequence[Path] = ()) -> dict[str, Any]:
    """The content of a file, laid over that of the file that it `extends`, a path beside its own:
    mappings key by key, and what is null is left out. Raises :class:`UserError`."""
    path = Path(path)
    if path.resolve() in extending:
        raise UserError(f"{path}: extends: it extends itself")
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with prompts and tables in it")
    if (other := content.pop("extends", None)) is None:
        return content
    if not isinstance(other, str):
        raise UserError(f"{path}: extends: expected the path of a file")
    base = _extended(path.parent / other, (*extending, path.resolve()))
    return _laid_over(base, content)


def _laid_over(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    kept = {key: value for key, value in old.items() if new.get(key, value) is not None}
    return kept | {
        key: _laid_over(old.get(key), value) for key, value in new.items() if value is not None
    }


def load_paper_plan(
    path: str | Path,
    only: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
    limit: int | None = None,
    recorded: int | None = None,
    chat_template: str | None = None,
    **overrides: Any,
) -> PaperPlan:
    """Read the file of a plan. `only` names the tables to keep, `sources` are the paths of prompt
    sets, `limit` is the number of prompts of each set that is not learned from. `recorded` is the
    number of prompts of each set that are recorded; unset, it is `limit`. A limit of the recording
    in the file is not exceeded. `chat_template` says how all are rendered, and `overrides` replace
    top-level values (:func:`specdec_core.config.overridden`).

    Raises :class:`UserError` for anything wrong in it, every configuration included."""
    content = _extended(path)
    plan = parse(PaperPlan, overridden(content, overrides), str(path))
    for name in only:
        if name not in plan.tables:
            raise UserError(f"--table {name}: {path} has no such table ({', '.join(plan.tables)})")
    tables = {
        key: table
        for key, table in plan.tables.items()
        if (not only or key in only) and table.draft <= max(len(plan.pair.drafts), 1)
    }
    if not tables:
        raise UserError(f"--table {', '.join(only)}: the pair has too few drafts for it")
    prompts = dict(plan.prompts)
    for name, source in (sources or {}).items():
        if name not in prompts or prompts[name].mix:
            known = ", ".join(key for key, prompt_set in prompts.items() if not prompt_set.mix)
            raise UserError(f"--prompts {name}={source}: {path} has no such set ({known})")
        prompts[name] = prompts[name].model_copy(update={"source": source, "optional": False})
    if limit is not None:
        learned = {n for each in plan.recordings.values() if each.learned for n in each.prompts}
        prompts |= {
            name: prompt_set.model_copy(update={"limit": limit * max(len(prompt_set.mix), 1)})
            for name, prompt_set in prompts.items()
            if name not in learned
        }
    most = recorded or limit
    recordings = {
        key: each
        if most is None or each.learned
        else each.model_copy(update={"limit": min(most, each.limit or most)})
        for key, each in plan.recordings.items()
    }
    if chat_template is not None:
        prompts = {
            name: s if s.mix else s.model_copy(update={"chat_template": chat_template})
            for name, s in prompts.items()
        }
    plan = plan.model_copy(update={"tables": tables, "prompts": prompts, "recordings": recordings})
    plan.check(str(path))
    return plan
