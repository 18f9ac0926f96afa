"""A search: configurations in which some values are open.

An entry looks like a :class:`Configuration`, but any value may be

- a list: one of its members (a grid takes all of them),
- `{choice: [a, b]}`: the same, where a list of lists or of mappings would be unclear,
- `{uniform: [low, high]}`, `{loguniform: [low, high]}`: a real number (random and Optuna search),
- `{randint: [low, high]}`: a whole number, both ends included,
- `{trees: {nodes: n, depth: d, most: b}}`: the branching of a tree of at most n nodes and d levels
  with at most b children a node.

A list of mappings is a value, not a choice, and so is a list where a sequence belongs, such as a
tree's branching or a bandit's arms. Values inside it may be open.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Literal, get_origin

from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.config import MOST_NODES, Configuration, Value, parse
from specdec_core.config.kinds import DRAFTERS, POLICIES, KindSettings, kinds_of

if TYPE_CHECKING:
    from optuna import Trial

MOST_CORNERS = 1024  # combinations of extreme values validated for each entry


@dataclass(frozen=True)
class AnyOf:
    """One of `values`."""

    values: tuple[Any, ...]

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.values

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    def suggest(self, name: str, trial: Trial) -> Any:
        # Optuna's categories are scalars, and a value may be a list: suggest its index.
        return self.values[trial.suggest_categorical(name, [*range(len(self.values))])]


@dataclass(frozen=True)
class Interval:
    """A number between `low` and `high`: a real one, evenly spread or evenly in its logarithm, or a
    whole one."""

    kind: Literal["uniform", "loguniform", "randint"]
    low: Any
    high: Any

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.low, self.high

    def draw(self, rng: random.Random) -> Any:
        if self.kind == "randint":
            return rng.randint(self.low, self.high)
        if self.kind == "uniform":
            return rng.uniform(self.low, self.high)
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)

    def suggest(self, name: str, trial: Trial) -> Any:
        if self.kind == "randint":
            return trial.suggest_int(name, self.low, self.high)
        return trial.suggest_float(name, self.low, self.high, log=self.kind == "loguniform")


class Trees(Value):
    """The branching of a k-configuration within a budget of nodes."""

    nodes: int = Field(ge=1, le=MOST_NODES)
    depth: int = Field(default=8, ge=1, le=MOST_NODES)
    most: int = Field(default=MOST_NODES, ge=1, le=MOST_NODES, description="children of a node")

    @cached_property
    def values(self) -> tuple[list[int], ...]:
        return tuple(map(list, k_configurations(self.nodes, self.depth, self.most)))

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.values[0], self.values[-1]

    def draw(self, rng: random.Random) -> list[int]:
        return rng.choice(self.values)

    def suggest(self, name: str, trial: Trial) -> list[int]:
        """Level by level within the budget, so that a search learns the value of each level; 0
        children end the tree."""
        branching: list[int] = []
        left = self.nodes  # for the subtree below each node of the last level
        while len(branching) < self.depth and left:
            level = f"{name}.{len(branching)}"
            count = trial.suggest_int(level, 1 if not branching else 0, min(self.most, left))
            if not count:
                break
            branching.append(count)
            left = left // count - 1
        return branching


def k_configurations(nodes: int, depth: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """All k-configurations of at most `nodes` nodes, `depth` levels and `most` children a node."""
    for count in range(1, min(nodes, most or nodes) + 1 if depth else 1):
        yield (count,)
        for rest in k_configurations(nodes // count - 1, depth - 1, most):
            yield (count, *rest)


Axis = AnyOf | Interval | Trees
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Space:
    """An entry of a search: a template and its open values."""

    source: str  # names the file and the entry in messages
    template: Mapping[str, Any]
    axes: Mapping[Path, Axis]

    @classmethod
    def of(cls, entry: Mapping[str, Any], source: str) -> Space:
        """Find the open values of `entry`; raises :class:`UserError` for a malformed one."""
        if not isinstance(entry, Mapping):
            raise UserError(f"{source}: expected a configuration (got {entry!r})")
        return cls(source, entry, dict(_open_values(entry, (), source)))

    def at(self, point: Iterable[Any]) -> Configuration:
        """The configuration with `point`, one value for each axis in order; raises
        :class:`UserError` when it is not a valid one."""
        filled = copy.deepcopy(dict(self.template))
        for path, value in zip(self.axes, point, strict=True):
            inner: Any = filled
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
        return parse(Configuration, filled, self.source)

    def grid(self) -> Iterator[Configuration]:
        values: list[Sequence[Any]] = []
        for path, axis in self.axes.items():
            if not isinstance(axis, AnyOf | Trees):
                where = ".".join(map(str, path))
                raise UserError(
                    f"{self.source}: {where}: a grid needs a list of values; draw from a range "
                    "with method random or optuna"
                )
            values.append(axis.values)
        yield from map(self.at, product(*values))

    def draw(self, rng: random.Random) -> Configuration:
        return self.at([axis.draw(rng) for axis in self.axes.values()])

    def suggest(self, prefix: str, trial: Trial) -> Configuration:
        return self.at(
            axis.suggest(".".join(map(str, (prefix, *path))), trial)
            for path, axis in self.axes.items()
        )

    def extremes(self) -> Iterator[Configuration]:
        """The configurations at the ends of every range, validated."""
        points = product(*(axis.extremes for axis in self.axes.values()))
        yield from map(self.at, islice(points, MOST_CORNERS))


@dataclass(frozen=True)
class Search:
    """The entries of a sweep's search."""

    spaces: tuple[Space, ...]

    @classmethod
    def of(cls, entries: Sequence[Mapping[str, Any]], source: str) -> Search:
        if not entries:
            raise UserError(f"{source}: search: nothing to search")
        return cls(tuple(Space.of(e, f"{source}: search.{i}") for i, e in enumerate(entries)))

    def grid(self) -> list[Configuration]:
        """Every configuration, once, in the order of the file."""
        return _distinct(c for space in self.spaces for c in space.grid())

    def draw(self, trials: int, seed: int) -> list[Configuration]:
        """`trials` distinct configurations, or fewer if there are not that many; entries are
        equally likely. The same for the same seed."""
        self.extremes()
        rng = random.Random(seed)
        drawn: dict[str, Configuration] = {}
        for _ in range(100 * trials):
            configuration = rng.choice(self.spaces).draw(rng)
            drawn.setdefault(configuration.id, configuration)
            if len(drawn) == trials:
                break
        return list(drawn.values())

    def suggest(self, trial: Trial) -> Configuration:
        """The configuration that an Optuna trial proposes."""
        index = 0
        if len(self.spaces) > 1:
            index = trial.suggest_categorical("entry", [*range(len(self.spaces))])
        return self.spaces[index].suggest(str(index), trial)

    def extremes(self) -> list[Configuration]:
        """Configurations at the ends of every range. If these are valid, so are those in between;
        raises :class:`UserError` for one that is not."""
        return _distinct(c for space in self.spaces for c in space.extremes())


def _distinct(configurations: Iterable[Configuration]) -> list[Configuration]:
    return list({c.id: c for c in configurations}.values())


def _open_values(value: Any, path: Path, source: str) -> Iterator[tuple[Path, Axis]]:
    if isinstance(value, Mapping):
        if not isinstance(kind := value.get("kind", ""), str):
            where = ".".join(map(str, (*path, "kind")))
            raise UserError(
                f"{source}: {where}: expected one, and an entry for each other (got {kind!r})"
            )
        if len(value) == 1 and (range_ := next(iter(value))) in _RANGES:
            yield path, _axis(range_, value[range_], path, source)
            return
        for key, inner in value.items():
            if isinstance(inner, list) and _is_sequence(kind, key):
                yield from _members(inner, (*path, key), source)
            else:
                yield from _open_values(inner, (*path, key), source)
    elif isinstance(value, list):
        if value and all(isinstance(member, Mapping) for member in value):
            yield from _members(value, path, source)
        else:
            yield path, _axis("choice", value, path, source)


def _members(values: list[Any], path: Path, source: str) -> Iterator[tuple[Path, Axis]]:
    """The open values inside the members of a list that is a value."""
    for index, inner in enumerate(values):
        if isinstance(inner, Mapping):
            yield from _open_values(inner, (*path, index), source)


def _is_sequence(kind: str, name: str) -> bool:
    """Whether this setting of a kind is a sequence."""
    for table in (DRAFTERS, POLICIES):
        if (settings := kinds_of(table, KindSettings).get(kind)) and name in settings.model_fields:
            return get_origin(settings.model_fields[name].annotation) is tuple
    return False


_RANGES = ("choice", "uniform", "loguniform", "randint", "trees")


def _axis(kind: Any, value: Any, path: Path, source: str) -> Axis:
    where = f"{source}: {'.'.join(map(str, path))}: {kind}"
    if kind == "choice":
        if not isinstance(value, list) or not value:
            raise UserError(f"{where}: expected a list of values (got {value!r})")
        return AnyOf(tuple(value))
    if kind == "trees":
        return parse(Trees, value, where)
    number = int if kind == "randint" else (int, float)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(v, number) and not isinstance(v, bool) for v in value)
        or not value[0] <= value[1]
    ):
        raise UserError(f"{where}: expected [low, high] with low ≤ high (got {value!r})")
    if kind == "loguniform" and value[0] <= 0:
        raise UserError(f"{where}: low must be above 0 (got {value[0]!r})")
    return Interval(kind, *value)
