"""What a target forward costs in steps of a draft model, measured before the first request."""

from __future__ import annotations

import statistics
import time

from specdec_core.base.errors import UserError
from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner

_REPEATS = 7  # the first ones warm up


def target_cost(pair: Pair, target: ModelRunner, drafts: DraftRunners, draft: str | None) -> float:
    """c = t_target / t_draft (Post-use & Pre-cut, §5.2) of forwards of one token, to three digits;
    `draft` None is the pair's first. The models take turns, and their rows are left as they were.

    Raises:
        UserError: the draft's weights are not in this process.
    """
    name = pair.draft_name(draft)
    if next(pair.drafts[name].parameters()).is_meta:
        raise UserError(
            f"policy.target_cost: profile: draft {name} runs elsewhere and cannot be timed here;"
            " give a number"
        )
    if name in pair.draft_models:
        own = drafts.open(name)
    else:
        own = pair.open_alone(name, 1)
        own.prefill([0], [[1]])  # a head does not read a text's first token
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
