"""Who proposes candidate tokens."""

from __future__ import annotations

from specdec_core.config import (
    BanditDrafter,
    CascadeDrafter,
    DrafterSettings,
    DraftModelDrafter,
    DynamicTreeDrafter,
    ForkDrafter,
    HybridDrafter,
    LookaheadDrafter,
    OuroborosDrafter,
    PearlDrafter,
    PostUseDrafter,
    PromptLookupDrafter,
    RetrievalDrafter,
    SuffixDrafter,
    TargetTreeDrafter,
    TokenCacheDrafter,
    TreeDrafter,
)
from specdec_core.drafting.bandit import BanditSpec
from specdec_core.drafting.cascade import Cascade
from specdec_core.drafting.draft_model import DraftModel
from specdec_core.drafting.drafter import Drafter, Resources
from specdec_core.drafting.dynamic_tree import DynamicTree
from specdec_core.drafting.fork import Fork
from specdec_core.drafting.hybrid import Hybrid
from specdec_core.drafting.lookahead import Lookahead
from specdec_core.drafting.ouroboros import Ouroboros
from specdec_core.drafting.pearl.drafter import Pearl
from specdec_core.drafting.post_use import PostUse
from specdec_core.drafting.prompt_lookup import PromptLookup
from specdec_core.drafting.retrieval import RetrievalLookup
from specdec_core.drafting.suffix import SuffixLookup
from specdec_core.drafting.target_tree import TargetTree
from specdec_core.drafting.token_cache import TokenCache
from specdec_core.drafting.tree import StaticTree


def build_drafter(settings: DrafterSettings, resources: Resources) -> Drafter:
    """The drafter that `settings` describe."""
    match settings:
        case DraftModelDrafter():
            return DraftModel(settings, resources)
        case TargetTreeDrafter():
            return TargetTree(settings, resources)
        case DynamicTreeDrafter():
            return DynamicTree(settings, resources)
        case ForkDrafter():
            return Fork(settings, resources)
        case TreeDrafter():
            return StaticTree(settings, resources)
        case PromptLookupDrafter():
            return PromptLookup(settings, resources)
        case SuffixDrafter():
            return SuffixLookup(settings, resources)
        case RetrievalDrafter():
            return RetrievalLookup(settings, resources)
        case LookaheadDrafter():
            return Lookahead(settings, resources)
        case HybridDrafter():
            return Hybrid(settings, resources, build_drafter)
        case TokenCacheDrafter():
            return TokenCache(settings, resources)
        case CascadeDrafter():
            return Cascade(settings, resources, build_drafter(settings.proposer, resources))
        case PostUseDrafter():
            return PostUse(settings, resources)
        case OuroborosDrafter():
            return Ouroboros(settings, resources)
        case PearlDrafter():
            return Pearl(settings, resources)
        case BanditDrafter():
            return BanditSpec(settings, resources, build_drafter)
    raise TypeError(f"no drafter for {type(settings).__name__}")
