"""Who proposes candidate tokens."""

from __future__ import annotations

from specdec_core.config import (
    BanditDrafter,
    DrafterSettings,
    DraftModelDrafter,
    DynamicTreeDrafter,
    PromptLookupDrafter,
)
from specdec_core.drafters.bandit import BanditSpec
from specdec_core.drafters.base import Drafter, Found, Lookup, Outcome, Resources, Sequencing
from specdec_core.drafters.draft_model import DraftModel
from specdec_core.drafters.dynamic_tree import DynamicTree
from specdec_core.drafters.prompt_lookup import PromptLookup

__all__ = [
    "BanditSpec",
    "DraftModel",
    "Drafter",
    "DynamicTree",
    "Found",
    "Lookup",
    "Outcome",
    "PromptLookup",
    "Resources",
    "Sequencing",
    "build_drafter",
]


def build_drafter(settings: DrafterSettings, resources: Resources) -> Drafter:
    """The drafter that `settings` describe."""
    match settings:
        case DraftModelDrafter():
            return DraftModel(settings, resources)
        case DynamicTreeDrafter():
            return DynamicTree(settings, resources)
        case PromptLookupDrafter():
            return PromptLookup(settings, resources)
        case BanditDrafter():
            return BanditSpec(settings, resources, build_drafter)
    raise TypeError(f"no drafter for {type(settings).__name__}")
