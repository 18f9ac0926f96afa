"""The engine: decodes requests, a round at a time."""

from specdec_core.engine.engine import Chunk, Engine, Request

__all__ = ["Chunk", "Engine", "Request"]
