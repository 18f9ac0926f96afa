"""What comparisons of several contestants share: who takes part, and how a group's best is held
against ours, whether requests are decoded one by one or under load."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import Configuration, Document, PairSpec
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.tokens.statistics import Ratio

OURS = "specdec"
LEAST_HALF = 4  # prompts in each half, for the best to be chosen on one and reported on the other
UNKNOWN = Ratio(*[float("nan")] * 3)


class Contender(Document):
    """Who takes part: this engine under a configuration, or a mode of another library."""

    name: str
    group: str  # its library: OURS, "transformers", "vllm"
    autoregressive: bool = False
    lossless: bool = True
    with_ours: bool = False  # another library with settings or a plug-in of ours: not its own best
    version: str = ""
    settings: dict[str, Any] = Field(default={})
    configuration: Configuration | None = None  # of ours

    @property
    def ours(self) -> bool:
        return self.group == OURS


AnyContender = TypeVar("AnyContender", bound=Contender)


class Lead(Document):
    """The best of ours against the best of a group. With `held_out`, both were chosen on every
    other prompt and compared on the rest; else chosen and compared on all, which favours both."""

    group: str
    ours: str
    theirs: str
    ratio: float
    low: float
    high: float
    prompts: int
    held_out: bool


class Comparison(Document, Generic[AnyContender]):
    """Everything that a comparison's report is written from."""

    FILE: ClassVar[str]
    WHAT: ClassVar[str]

    name: str
    started: datetime
    command: str
    pair: PairSpec  # with the data types that were used
    prompts: PromptSet
    max_new_tokens: int
    repeats: int
    rows: list[AnyContender]
    notes: list[str] = Field(default=[])
    environment: dict[str, str] = Field(default={})

    @property
    def groups(self) -> list[str]:
        """Whose contenders there are, ours first."""
        return sorted({row.group for row in self.rows}, key=lambda group: (group != OURS, group))

    @property
    def others(self) -> list[str]:
        """The groups that are not ours."""
        return [group for group in self.groups if group != OURS]

    def save(self, folder: Path) -> Path:
        return write_atomically(folder / self.FILE, self.model_dump_json())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote; raises :class:`UserError` where there is nothing."""
        path = Path(folder) / cls.FILE
        if not path.exists():
            raise UserError(f"{folder}: no {cls.WHAT} in it (no {cls.FILE})")
        return cls.model_validate_json(path.read_text())


def lead_over(
    group: str,
    count: int,
    best: Callable[[str, slice], AnyContender | None],
    over: Callable[[AnyContender, AnyContender, slice], Ratio],
) -> Lead | None:
    """Our best against that of `group`, of `count` prompts: `best` is the best of a group on some
    of them, `over` the ratio of two contenders there. None where either has none."""
    held_out = count >= 2 * LEAST_HALF
    everything = slice(None), slice(None)
    choose, report = (slice(0, None, 2), slice(1, None, 2)) if held_out else everything
    ours, theirs = best(OURS, choose), best(group, choose)
    if ours is None or theirs is None:
        return None
    ratio = over(ours, theirs, report)
    return Lead(
        group=group,
        ours=ours.name,
        theirs=theirs.name,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        prompts=len(range(count)[report]),
        held_out=held_out,
    )


def ratio_columns(name: str, ratio: Ratio) -> dict[str, float]:
    """A ratio and the ends of its interval, as columns of a table."""
    return {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
