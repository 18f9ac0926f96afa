"""The rows of a recording that belong together."""

import numpy as np

from specdec_core.recordings.schema import Trace


def rows_after(trace: Trace, draft: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n,) of the trajectory's candidates Y_t, and rows (n,) of the tokens that `draft` drafts
    after them. The hidden state of such a row is the state of Y_t: it is the next position where
    Y_t is the target's token, else the continuation. For an EAGLE head, which drafts the next
    position from the target's features, it is always the continuation. Candidates without such a
    row are left out."""
    rows = trace.drafted
    agrees = trace.draft_token[rows] == trace.target_token[rows]
    next_position = agrees & (draft not in trace.header.eagle_heads)
    keys = _keys(trace.prompt, trace.position, trace.step)
    order = np.argsort(keys)
    sought = _keys(
        trace.prompt[rows], trace.position[rows] + next_position, (~next_position).astype(int)
    )
    places = np.searchsorted(keys, sought, sorter=order).clip(max=len(keys) - 1)
    after = order[places]
    recorded = (keys[after] == sought) & trace.is_drafted[after]
    return rows[recorded], after[recorded]


def _keys(prompt: np.ndarray, position: np.ndarray, step: np.ndarray) -> np.ndarray:
    low = (position.astype(np.int64) << 16) | step
    return np.asarray((prompt.astype(np.int64) << 40) | low)
