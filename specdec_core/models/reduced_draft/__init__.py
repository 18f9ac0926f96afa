"""Draft models with an output layer over some tokens of their target's vocabulary."""

from specdec_core.models.reduced_draft.model import ReducedDraft, ReducedDraftConfig

__all__ = ["ReducedDraft", "ReducedDraftConfig"]
