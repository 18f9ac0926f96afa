"""The hidden states of a server's target, which vLLM writes to files beside its answers.

vLLM does so with the speculative method `extract_hidden_states` and the connector
`ExampleHiddenStatesConnector`. An answer names its file, which has a lock until it is written. The
file is read on this machine, so its folder is here or on a shared disk.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec_core.base.errors import UserError

_FIELD = "kv_transfer_params"
# In a request: of the answer, too, not of the prompt alone.
ASKED: dict[str, Any] = {_FIELD: {"include_output_tokens": True}}


def written(answer: Mapping[str, Any]) -> Path | None:
    """The file that an answer names; None where it names none."""
    given = answer.get(_FIELD)
    place = given.get("hidden_states_path") if isinstance(given, Mapping) else None
    return Path(place) if isinstance(place, str) else None


def taken(path: Path, tokens: Sequence[int]) -> Tensor:
    """The hidden states of these `tokens` in a file (n, layers · width), once it is written; the
    file is removed. Raises :class:`UserError` where it cannot be read or is of other tokens."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # waits for the writer
        content = load_file(path)
        states, of = content["hidden_states"], content["token_ids"].tolist()
        if of[: len(tokens)] != list(tokens):
            raise UserError(f"{path}: hidden states of other tokens than the answer's")
        for each in (path, lock):  # written for this answer alone
            each.unlink()
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path}: hidden states cannot be read here: {error}") from None
    return states[: len(tokens)].flatten(1)
