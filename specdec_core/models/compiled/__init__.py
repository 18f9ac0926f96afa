"""Forwards as compiled graphs."""

from specdec_core.models.compiled.runner import CompiledRunner

__all__ = ["CompiledRunner"]
