"""A certificate: what was shown of a configuration on the models that it is served with.

These are values, so that reading a certificate loads no model.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, Sampling, Value, identity
from specdec_core.config.base import describe
from specdec_core.models.fingerprints import fingerprints
from specdec_core.prompts.prompt import PromptSet


class GreedyIdentity(Value):
    """Greedy outputs in float32, with `slots` requests decoded together, compared with outputs of
    autoregressive decoding, one request at a time. `first` says where the first difference is."""

    prompts: int
    tokens: int
    slots: int
    differing: int
    first: str = ""

    @property
    def passed(self) -> bool:
        return self.differing == 0


class Favour(Value):
    """How much more often than by the target's probabilities tokens of a kind were sampled.

    Args:
        kind: the tokens, in words.
        shift: their share of the sampled tokens, less the share expected.
        error: the standard error of that, which the probabilities give exactly.
        p_value: two-sided, of the hypothesis that there is no shift.
        detectable: the shift that is found 99 times in 100.
    """

    kind: str
    shift: float
    error: float
    p_value: float
    detectable: float


class SampledDistribution(Value):
    """Sampled tokens against the target's own probabilities for each of them, in float32. All
    `favours` together are false alarms with probability `level`; `impossible` tokens are those to
    which the sampling gives no probability."""

    sampling: Sampling
    texts: int
    tokens: int
    level: float
    favours: tuple[Favour, ...]
    impossible: int = 0

    @property
    def passed(self) -> bool:
        return not self.impossible and not any(map(self.shifted, self.favours))

    def shifted(self, favour: Favour) -> bool:
        """Whether these tokens were sampled too often or too rarely."""
        return favour.p_value < self.level / len(self.favours)


class LiveSpeed(Value):
    """How many times faster than autoregressive decoding, interleaved on the same prompts, one
    request at a time, with its 95 % interval."""

    prompts: int
    repeats: int
    ratio: float
    low: float
    high: float
    tokens_per_second: float
    target_dtype: str
    draft_dtype: str

    @property
    def passed(self) -> bool:
        """Whether it was not shown to be slower."""
        return self.high >= 1


class Checks(Value):
    """What was found; also where it is no reason for a certificate."""

    greedy: GreedyIdentity
    sampled: SampledDistribution
    speed: LiveSpeed

    @property
    def failures(self) -> tuple[str, ...]:
        """The checks that failed."""
        passed = {
            "greedy identity": self.greedy.passed,
            "distribution": self.sampled.passed,
            "speed": self.speed.passed,
        }
        return tuple(name for name, found in passed.items() if not found)


class Certificate(Value):
    """The checks of a configuration on the weights with these `fingerprints`; all were passed.

    It is not signed: it keeps a mistake from being served, not a forger.
    """

    pair: PairSpec
    fingerprints: dict[str, str]
    configuration: Configuration
    prompts: PromptSet
    max_new_tokens: int
    checks: Checks
    issued: datetime
    environment: dict[str, str]

    def model_post_init(self, _: Any) -> None:
        if self.checks.failures:
            raise ValueError(f"checks: failed: {', '.join(self.checks.failures)}")

    @property
    def id(self) -> str:
        """Its digest: a certificate of the same id says the same."""
        return identity(self)

    @property
    def sentence(self) -> str:
        """What it says, in a line."""
        checks = self.checks
        return (
            f"certified {self.issued:%Y-%m-%d}: {checks.greedy.tokens:,} greedy and"
            f" {checks.sampled.tokens:,} sampled tokens as the target's,"
            f" {checks.speed.ratio:.2f}× autoregressive"
        )

    def save(self) -> Path:
        """Write it where :func:`find_certificate` looks."""
        path = certificate_path(self.pair, self.configuration)
        return write_atomically(path, self.model_dump_json(indent=1))


def certificate_path(pair: PairSpec, configuration: Configuration) -> Path:
    """The workspace's file for the certificate of a configuration."""
    return workspace() / "certificates" / f"{pair.name}-{configuration.id}.json"


def find_certificate(pair: PairSpec, configuration: Configuration) -> Certificate | None:
    """The workspace's certificate of a configuration on these very weights; None where it has none.

    Raises:
        UserError: there is a file, but no certificate in it.
    """
    path = certificate_path(pair, configuration)
    if not path.exists():
        return None
    try:
        found = Certificate.model_validate_json(path.read_text())
    except ValidationError as error:
        raise UserError(f"{path}: not a certificate: {describe(error)}") from None
    if found.configuration != configuration:
        return None
    return found if found.fingerprints == fingerprints(pair) else None
