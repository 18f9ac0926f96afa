"""The engine: decodes requests, a round at a time."""

from specdec_core.engine.engine import Engine
from specdec_core.engine.request import Chunk, Request

__all__ = ["Chunk", "Engine", "Request"]
