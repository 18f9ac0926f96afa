"""The models of a pair, and how they are executed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from specdec_core.base.errors import UserError
from specdec_core.base.names import names_folder
from specdec_core.config.base import Value

DType = Literal["auto", "float32", "bfloat16", "float16"]
_TARGET = "bundled:target"
_DRAFTS = {"medium": "bundled:draft-medium", "small": "bundled:draft-small"}


class RunnerSettings(Value):
    """How a model is executed.

    `auto` takes a GPU where there is one; the data type `auto` is the checkpoint's on a GPU and
    the faster one, measured, on a CPU.
    """

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    target_dtype: DType = "auto"
    draft_dtype: DType = "auto"
    max_length: int = Field(default=1024, ge=8, description="tokens a slot can hold")
    threads: int = Field(default=1, ge=1, description="CPU threads for each process")
    pack: bool = Field(default=True, description="lay weights out for the CPU once, at loading")
    compile: bool = Field(
        default=False,
        description="run compiled graphs; the first start of a model takes minutes, later ones read"
        " the graphs from disk",
    )


_RESERVED = ("target", "prompt_lookup", "suffix")  # of what else is measured


def _drafts_of(pair: dict[str, Any]) -> dict[str, str]:
    return dict(_DRAFTS) if pair.get("target") == _TARGET else {}


def _named(drafts: dict[str, str]) -> dict[str, str]:
    for name in drafts:
        if name in _RESERVED:
            raise ValueError(f"a draft cannot be called {name}")
        if not names_folder(name):  # recordings and trained heads have a folder for each draft
            raise ValueError(f"{name!r} names a draft: expected a folder's name, not a path")
    return drafts


class PairSpec(Value):
    """A target and its drafts by hub id, local folder, `package:<name>` or `bundled:<name>`. The
    drafts of the bundled target are there if none are named; another target has none then."""

    target: str = _TARGET
    drafts: Annotated[dict[str, str], AfterValidator(_named)] = Field(default_factory=_drafts_of)
    runner: RunnerSettings = RunnerSettings()

    def with_runner(self, **changes: Any) -> PairSpec:
        """This pair with these settings of its runner, which are not checked."""
        return self.model_copy(update={"runner": self.runner.model_copy(update=changes)})

    @property
    def name(self) -> str:
        """A readable name, also of the MLflow experiment."""
        names = map(_called, (self.target, *self.drafts.values()))
        return "-".join([*(["bundled"] if self.target.startswith("bundled:") else []), *names])


def _called(model: str) -> str:
    """The last part of a model's place, as MLflow can register it: a folder such as `.` by its own
    name, without `bundled:` or `package:`, as no model has a colon in its name, and no quotes, of
    which MLflow's filters take none."""
    name = Path(model).name
    if name in ("", ".."):
        name = Path(model).resolve().name
    return name.rpartition(":")[2].replace("'", "_")


def draft_named(drafts: Collection[str], name: str | None, where: str) -> str:
    """The draft of a pair that is called `name`; the first one for None. Raises :class:`UserError`,
    naming `where`, for a draft that is not among the pair's `drafts`."""
    name = next(iter(drafts), None) if name is None else name
    if name is None:
        raise UserError(
            f"{where}: it needs a draft model, and the pair has none: give one under pair.drafts"
        )
    if name not in drafts:
        known = ", ".join(drafts) or "none"
        raise UserError(f"{where}: the pair has no draft {name!r} (it has: {known})")
    return name
