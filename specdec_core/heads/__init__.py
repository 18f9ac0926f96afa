"""Networks that predict acceptance: SpecDec++'s heads and improved MCSD's decision models."""

from specdec_core.heads.card import HeadCard, HeadSpec, TrainingSettings
from specdec_core.heads.loaded import LoadedHead
from specdec_core.heads.modules import (
    AcceptanceHead,
    DistributionDecision,
    Head,
    HiddenDecision,
    JointDecision,
    build_head,
)
from specdec_core.heads.storage import load_card, load_head, save_head

__all__ = [
    "AcceptanceHead",
    "DistributionDecision",
    "Head",
    "HeadCard",
    "HeadSpec",
    "HiddenDecision",
    "JointDecision",
    "LoadedHead",
    "TrainingSettings",
    "build_head",
    "load_card",
    "load_head",
    "save_head",
]
