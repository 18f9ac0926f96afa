"""What a target forward costs in steps of a draft model, measured before the first request.

It is measured once for a pair on a machine, and kept for all processes and workspaces: policies
stop by it, so that with a seed a later one writes the same.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time

from specdec_core.base.environment import machine
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import kept_folder
from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner

_REPEATS = 7  # the first ones warm up


def target_cost(pair: Pair, target: ModelRunner, drafts: DraftRunners, draft: str | None) -> float:
    """c = t_target / t_draft (Post-use & Pre-cut, §5.2) of forwards of one token, to three digits;
    `draft` None is the pair's first. Where it is measured, the models take turns, and their rows
    are left as they were.

    Raises:
        UserError: the draft's weights are not in this process.
    """
    name = pair.draft_name(draft)
    if next(pair.drafts[name].parameters()).is_meta:
        raise UserError(
            f"policy.target_cost: profile: draft {name} runs elsewhere and cannot be timed here;"
            " give a number"
        )
    weights = [pair.fingerprints[TARGET], pair.fingerprints[name]]
    runner = pair.spec.runner.model_dump(mode="json", exclude={"max_length"})
    facts = json.dumps([weights, runner, machine()], sort_keys=True)
    kept = kept_folder("costs") / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        cost = _measured(pair, target, drafts, name)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(cost))
    return float(json.loads(kept.read_text()))


def _measured(pair: Pair, target: ModelRunner, drafts: DraftRunners, name: str) -> float:
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
