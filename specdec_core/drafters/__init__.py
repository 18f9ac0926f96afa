"""Who proposes candidate tokens."""

from __future__ import annotations

from specdec_core.config import (
    DrafterSettings,
    DraftModelDrafter,
    PromptLookupDrafter,
)
from specdec_core.drafters.base import Drafter, Found, Lookup, Outcome, Resources, Sequencing
from specdec_core.drafters.draft_model import DraftModel
from specdec_core.drafters.prompt_lookup import PromptLookup

__all__ = [
    "DraftModel",
    "Drafter",
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
        case PromptLookupDrafter():
            return PromptLookup(settings, resources)
    raise TypeError(f"no drafter for {type(settings).__name__}")
