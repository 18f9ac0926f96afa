"""Configurations: frozen settings that round-trip through YAML and JSON.

The settings of each kind of drafter and length policy are in the kind's module
(:mod:`specdec_core.config.kinds`).
"""

from specdec_core.config.base import (
    Document,
    Stored,
    Value,
    identity,
    load_yaml,
    overridden,
    parse,
    parse_json,
)
from specdec_core.config.chosen import PairConfiguration
from specdec_core.config.configuration import AUTOREGRESSIVE, Configuration, costless
from specdec_core.config.drafters import (
    MOST_NODES,
    AnyChain,
    AnyDrafter,
    AnyLookup,
    Branching,
    ChainSettings,
    DrafterSettings,
    LookupSettings,
    Memory,
    ModelSettings,
    PolicyDrafterSettings,
    Width,
)
from specdec_core.config.kinds import add_drafter, add_policy, run_time
from specdec_core.config.labels import distinct_labels
from specdec_core.config.pair import PairSpec, RunnerSettings, draft_named
from specdec_core.config.placement import DraftPlacement, Placement, TargetPlacement
from specdec_core.config.policies import (
    CANDIDATES,
    MOST_TOKENS,
    AnyPolicy,
    CandidateCost,
    Costs,
    HeadSettings,
    MaxTokens,
    PolicySettings,
    PricedSettings,
    TargetCost,
)
from specdec_core.config.recorded import RecordingFacts
from specdec_core.config.sampling import Sampling, Temperature

__all__ = [
    "AUTOREGRESSIVE",
    "CANDIDATES",
    "MOST_NODES",
    "MOST_TOKENS",
    "AnyChain",
    "AnyDrafter",
    "AnyLookup",
    "AnyPolicy",
    "Branching",
    "CandidateCost",
    "ChainSettings",
    "Configuration",
    "Costs",
    "Document",
    "DraftPlacement",
    "DrafterSettings",
    "HeadSettings",
    "LookupSettings",
    "MaxTokens",
    "Memory",
    "ModelSettings",
    "PairConfiguration",
    "PairSpec",
    "Placement",
    "PolicyDrafterSettings",
    "PolicySettings",
    "PricedSettings",
    "RecordingFacts",
    "RunnerSettings",
    "Sampling",
    "Stored",
    "TargetCost",
    "TargetPlacement",
    "Temperature",
    "Value",
    "Width",
    "add_drafter",
    "add_policy",
    "costless",
    "distinct_labels",
    "draft_named",
    "identity",
    "load_yaml",
    "overridden",
    "parse",
    "parse_json",
    "run_time",
]
