"""What a target forward costs in steps of a draft model, measured before the first request."""

from __future__ import annotations

import statistics
import time

from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner

_REPEATS = 7  # the first ones warm up


def target_cost(pair: Pair, target: ModelRunner, drafts: DraftRunners, draft: str | None) -> float:
    """c = t_target / t_draft (Post-use & Pre-cut, §5.2) of forwards of one token, to three digits;
    `draft` None is the pair's first. The models take turns, and their rows are left as they were.
    """
    name = pair.draft_name(draft)
    own = drafts.open(name) if name in pair.draft_models else pair.open_alone(name, 1)
    seconds: list[tuple[float, float]] = []
    for _ in range(_REPEATS):
        seconds.append((_time_token(target), _time_token(own)))
    of_target, of_draft = map(statistics.median, zip(*seconds[2:], strict=True))
    return float(f"{of_target / of_draft:.3g}")


def _time_token(runner: ModelRunner) -> float:
    """Seconds of a forward of one token of the first row."""
    length = runner.lengths[0]
    start = time.perf_counter()
    output = runner.forward(Batch([0], [[1]]))
    output.logits[0, 0].item()  # waits for the device
    seconds = time.perf_counter() - start
    runner.truncate(0, length)
    return seconds
