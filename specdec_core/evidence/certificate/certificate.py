"""A certificate: what was shown of a configuration on the models that it is served with.

These are values, so that reading a certificate loads no model.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, Sampling, Value, identity, parse_json
from specdec_core.models.fingerprints import fingerprints, served_fingerprints
from specdec_core.prompts.prompt import PromptSet


class GreedyIdentity(Value):
    """Greedy outputs with `slots` requests decoded together, compared with outputs of
    autoregressive decoding. `first` says where the first difference is.

    In float32 all must be equal. In another data type of a server's, rounding depends on the tokens
    that a forward verifies: an output may differ where two tokens are nearly equally likely. `ties`
    of the differing outputs do.
    """

    prompts: int
    tokens: int
    slots: int
    differing: int
    first: str = ""
    ties: int = 0
    dtype: str = "float32"

    @property
    def passed(self) -> bool:
        return self.differing == self.ties


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
    """Sampled tokens against the target's own probabilities for each of them. All
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
        shifted = any(map(self.shifted, self.favours))
        return self.tokens > 0 and not self.impossible and not shifted

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
    """What was found; also where it is no reason for a certificate. A server's speed is not
    measured."""

    greedy: GreedyIdentity
    sampled: SampledDistribution
    speed: LiveSpeed | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """The checks that failed."""
        passed = {
            "greedy identity": self.greedy.passed,
            "distribution": self.sampled.passed,
            "speed": self.speed is None or self.speed.passed,
        }
        return tuple(name for name, found in passed.items() if not found)


class CertifiedServer(Value):
    """The server in which a configuration was checked.

    Args:
        name: the server's, as `--engine` takes it; of a running server, its URL.
        version: what it says of its version.
        settings: those that it was started with; none are known of a running server.
        reference: what its output was compared with, in words.
    """

    name: str
    version: str
    settings: dict[str, Any]
    reference: str

    @property
    def key(self) -> str:
        """The name in names of files and tags."""
        return re.sub(r"\W+", "-", self.name)


class Certificate(Value):
    """The checks of a configuration on the weights with these `fingerprints`; all were passed. In a
    `server`, unless they were made in this library's engine.

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
    server: CertifiedServer | None = None

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
        checks, speed = self.checks, self.checks.speed
        where = "" if self.server is None else f" in {self.server.version or self.server.name}"
        return (
            f"certified {self.issued:%Y-%m-%d}{where}: {checks.greedy.tokens:,} greedy and"
            f" {checks.sampled.tokens:,} sampled tokens as the target's"
            + ("" if speed is None else f", {speed.ratio:.2f}× autoregressive")
        )

    def save(self) -> Path:
        """Write it where :func:`find_certificate` looks."""
        key = None if self.server is None else self.server.key
        path = certificate_path(self.pair, self.configuration, key)
        return write_atomically(path, self.model_dump_json(indent=1))


def certificate_path(
    pair: PairSpec, configuration: Configuration, server: str | None = None
) -> Path:
    """The workspace's file for the certificate of a configuration, in the server of a key."""
    where = "" if server is None else f"-{server}"
    return workspace() / "certificates" / f"{pair.name}-{configuration.id}{where}.json"


def find_certificate(
    pair: PairSpec, configuration: Configuration, server: str | None = None
) -> Certificate | None:
    """The workspace's certificate of a configuration on these very weights, in the server of a key;
    None where it has none. A server may run a target that has no weights here: it is then the one
    of the same name. Raises :class:`UserError` where the file holds no certificate."""
    path = certificate_path(pair, configuration, server)
    if not path.exists():
        return None
    found = parse_json(Certificate, path.read_bytes(), f"{path}: not a certificate")
    if found.configuration != configuration:
        return None
    here = fingerprints(pair) if server is None else served_fingerprints(pair, pair.target)
    return found if found.fingerprints == here else None
