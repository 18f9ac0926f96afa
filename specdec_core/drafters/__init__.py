"""Who proposes candidate tokens."""

from __future__ import annotations

from specdec_core.config import (
    BanditDrafter,
    CascadeDrafter,
    DrafterSettings,
    DraftModelDrafter,
    DynamicTreeDrafter,
    PostUseDrafter,
    PromptLookupDrafter,
    TokenCacheDrafter,
)
from specdec_core.drafters.bandit import BanditSpec
from specdec_core.drafters.base import Drafter, Found, Lookup, Outcome, Resources, Sequencing
from specdec_core.drafters.cascade import Cascade
from specdec_core.drafters.draft_model import DraftModel
from specdec_core.drafters.dynamic_tree import DynamicTree
from specdec_core.drafters.post_use import PostUse
from specdec_core.drafters.prompt_lookup import PromptLookup
from specdec_core.drafters.tree import StaticTree
from specdec_core.drafters.token_cache import TokenCache

__all__ = [
    "BanditSpec",
    "Cascade",
    "DraftModel",
    "Drafter",
    "DynamicTree",
    "Found",
    "Lookup",
    "Outcome",
    "PostUse",
    "PromptLookup",
    "Resources",
    "Sequencing",
    "TokenCache",
    "build_drafter",
]


def build_drafter(settings: DrafterSettings, resources: Resources) -> Drafter:
    """The drafter that `settings` describe."""
    match settings:
        case DraftModelDrafter():
            return DraftModel(settings, resources)
        case DynamicTreeDrafter():
            return DynamicTree(settings, resources)
        case TreeDrafter():
            return StaticTree(settings, resources)
        case PromptLookupDrafter():
            return PromptLookup(settings, resources)
        case TokenCacheDrafter():
            return TokenCache(settings, resources)
        case CascadeDrafter():
            return Cascade(settings, resources, build_drafter(settings.proposer, resources))
        case PostUseDrafter():
            return PostUse(settings, resources)
        case BanditDrafter():
            return BanditSpec(settings, resources, build_drafter)
    raise TypeError(f"no drafter for {type(settings).__name__}")
