"""Reading an answer's server-sent events."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole answer, of which none may be an error."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]", answer.text
    return [json.loads(line) for line in lines]
