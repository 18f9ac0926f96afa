"""Server-sent events."""

from __future__ import annotations

from pydantic import BaseModel

# JSON leaves these as they are, and clients that split lines as Python does end one there.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})

DONE = "data: [DONE]\n\n"


def event(value: BaseModel) -> str:
    """The event with this value: its data are one line, however lines are split. A value with a
    type gives the event its name."""
    kind = getattr(value, "type", None)
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {value.model_dump_json().translate(_LINE_ENDS)}\n\n"
