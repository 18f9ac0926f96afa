"""What a sweep leaves behind: the document that the report, MLflow and the command line read."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from specdec_core.config import Configuration, PairSpec
from specdec_core.cost import Profile
from specdec_core.files import write_atomically


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptSet(Document):
    """Which prompts were used."""

    source: str  # "bundled:held_out", a path or a hub id
    count: int
    digest: str  # sha256 over the texts


class Trial(Document):
    """One configuration and its counts (load-independent) over the prompt set."""

    configuration: Configuration
    counts: dict[str, int]  # stats.Counts
    metrics: dict[str, float]  # stats.Counts.metrics() and estimated_speedup
    finished: bool = True  # False when a scheduler stopped it early
    mlflow_run_id: str | None = None

    @property
    def id(self) -> str:
        return self.configuration.id


class Timing(Document):
    """A finalist timed alone, interleaved with autoregressive decoding on the same prompts."""

    config_id: str
    seconds: list[list[float]]  # [repeat][prompt]
    tokens: list[int]  # [prompt]
    speedup: float  # over autoregressive; 1 for autoregressive itself
    low: float
    high: float
    tokens_per_second: float
    tied_with_champion: bool = False
    differing_outputs: int = 0  # greedy outputs unequal to autoregressive (bfloat16 near-ties)


class OraclePoint(Document):
    """SpecDec++ Theorem 4.1 for one draft: no discards, one verification per disagreement."""

    draft: str
    verification_rate: float
    speedup: float  # predicted with the profile


class SweepResult(Document):
    """Everything a sweep found out."""

    name: str
    started: datetime
    pair: PairSpec
    prompts: PromptSet
    max_new_tokens: int
    profile: Profile
    trials: list[Trial] = Field(default=[])
    oracles: list[OraclePoint] = Field(default=[])
    autoregressive: Timing | None = None
    timings: list[Timing] = Field(default=[])
    champion: str | None = None  # config_id
    environment: dict[str, str] = Field(default={})  # git commit, hardware, library versions
    mlflow_run_id: str | None = None

    def trial(self, config_id: str) -> Trial:
        return next(t for t in self.trials if t.id == config_id)

    @property
    def champion_trial(self) -> Trial:
        if self.champion is None:
            raise ValueError(f"sweep {self.name} has no champion")
        return self.trial(self.champion)

    def save(self, folder: Path) -> Path:
        return write_atomically(folder / "sweep.json", self.model_dump_json(indent=1))

    @classmethod
    def load(cls, folder: Path) -> SweepResult:
        return cls.model_validate_json((Path(folder) / "sweep.json").read_text())
