"""Who proposes candidate tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specdec_core.config import Drafter as DrafterSettings
from specdec_core.config import DraftModelDrafter, PromptLookupDrafter
from specdec_core.drafters.base import Drafter, Sequencing
from specdec_core.drafters.draft_model import DraftModel
from specdec_core.drafters.prompt_lookup import PromptLookup
from specdec_core.heads import LoadedHead
from specdec_core.policies import build_policy
from specdec_core.runner import ModelRunner

__all__ = ["DraftModel", "Drafter", "PromptLookup", "Sequencing", "build_drafter"]


def build_drafter(
    settings: DrafterSettings,
    draft_runner: Callable[[str | None], ModelRunner],
    load_head: Callable[[str | None, str], LoadedHead],
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> Drafter:
    """The drafter that `settings` describe; `draft_runner` gives the runner of a draft by name,
    `load_head` a head by the names of its draft and its own."""
    match settings:
        case DraftModelDrafter():
            policy = build_policy(settings.policy, partial(load_head, settings.draft))
            return DraftModel(draft_runner(settings.draft), policy, vocab_size, eos_token_ids)
        case PromptLookupDrafter():
            return PromptLookup(settings)
    raise TypeError(f"no drafter for {type(settings).__name__}")
