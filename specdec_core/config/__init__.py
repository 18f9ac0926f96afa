"""One configuration, one value: frozen settings that round-trip through YAML and JSON.

The settings of each kind of drafter and length policy are in the kind's own place
(:mod:`specdec_core.config.kinds`).
"""

from specdec_core.config.base import Document, Value, describe, identity, load_yaml, parse
from specdec_core.config.configuration import AUTOREGRESSIVE, Configuration
from specdec_core.config.drafters import (
    MOST_NODES,
    AnyDrafter,
    DrafterSettings,
    LookupSettings,
    ModelSettings,
)
from specdec_core.config.kinds import add_drafter, add_policy, run_time
from specdec_core.config.labels import distinct_labels
from specdec_core.config.pair import DType, PairSpec, RunnerSettings
from specdec_core.config.placement import DraftPlacement, Placement, TargetPlacement
from specdec_core.config.policies import MOST_TOKENS, AnyPolicy, PolicySettings
from specdec_core.config.recorded import RecordingFacts
from specdec_core.config.sampling import Sampling

__all__ = [
    "AUTOREGRESSIVE",
    "MOST_NODES",
    "MOST_TOKENS",
    "AnyDrafter",
    "AnyPolicy",
    "Configuration",
    "DType",
    "Document",
    "DraftPlacement",
    "DrafterSettings",
    "LookupSettings",
    "ModelSettings",
    "PairSpec",
    "Placement",
    "PolicySettings",
    "RecordingFacts",
    "RunnerSettings",
    "Sampling",
    "TargetPlacement",
    "Value",
    "add_drafter",
    "add_policy",
    "describe",
    "distinct_labels",
    "identity",
    "load_yaml",
    "parse",
    "run_time",
]
