"""Traces: JSONL files of requests with their arrival times.

```json
{"arrival": 0.00, "prompt": "def main():", "max_new_tokens": 128}
{"arrival": 0.10, "messages": [{"role": "user", "content": "hello"}]}
{"arrival": 0.25, "prompt_tokens": 812, "output_tokens": 64}
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from specdec_core.base.errors import UserError
from specdec_core.config import Value, parse
from specdec_core.prompts.chat import read_messages
from specdec_core.prompts.prompt import Message
from specdec_core.prompts.prompt_sets import file_records


class TraceRequest(Value):
    """One request of a trace."""

    arrival: float = Field(
        ge=0, allow_inf_nan=False, description="seconds after the trace's beginning"
    )
    prompt: str | None = Field(default=None, min_length=1, description="the prompt's text, …")
    messages: tuple[Message, ...] = Field(default=(), description="… a chat's messages, …")
    prompt_tokens: PositiveInt | None = Field(default=None, description="… or its length alone")
    output_tokens: PositiveInt | None = Field(
        default=None,
        description="tokens of the answer, exactly; unset, as many as there are",
    )
    max_new_tokens: PositiveInt | None = Field(
        default=None, description="the most tokens of the answer; unset, the run's"
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        given = (self.prompt is not None, bool(self.messages), self.prompt_tokens is not None)
        if sum(given) != 1:
            raise ValueError("give a prompt, messages, or prompt_tokens, the prompt's length")
        return self

    @property
    def written(self) -> bool:
        """Whether its prompt is a text or a chat, not a length alone."""
        return self.prompt is not None or bool(self.messages)

    def most_tokens(self, otherwise: int) -> int:
        """Tokens that are generated at most; `otherwise` where the request does not say."""
        limits = [n for n in (self.output_tokens, self.max_new_tokens) if n is not None]
        return min(limits, default=otherwise)


def read_trace(path: str | Path) -> list[TraceRequest]:
    """The requests of a trace, in order. Raises :class:`UserError`, naming the line, for one that
    is malformed or comes before the one above it, and for a file without requests."""
    requests: list[TraceRequest] = []
    for where, record in file_records(Path(path)):
        if isinstance(record, dict) and "messages" in record:
            record = {**record, "messages": read_messages(record["messages"], where)}
        request = parse(TraceRequest, record, where)
        if requests and request.arrival < requests[-1].arrival:
            raise UserError(
                f"{where}: arrival {request.arrival:g} s is before that of the request above"
                f" ({requests[-1].arrival:g} s)"
            )
        requests.append(request)
    if not requests:
        raise UserError(f"{path}: a workload without requests: the file is empty")
    return requests
