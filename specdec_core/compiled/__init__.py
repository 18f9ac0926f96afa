"""Forwards as compiled graphs."""

from specdec_core.compiled.runner import CompiledRunner

__all__ = ["CompiledRunner"]
