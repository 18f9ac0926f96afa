"""What a target forward costs in steps of a draft model, measured before the first request.

It is measured once for a pair on a machine, and kept for all processes and workspaces: length
policies depend on it, so a later process with the same seed gives the same output. For a target in
another program it is measured in each process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Callable
from functools import partial

from specdec_core.base.environment import machine
from specdec_core.base.files import alone, write_atomically
from specdec_core.base.workspace import kept_folder
from specdec_core.config import CANDIDATES
from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner, time_forward

log = logging.getLogger(__name__)

_REPEATS = 7  # the first ones warm up


class ForwardCosts:
    """The cost of a target forward beside the runners of a pair's drafts: `known`, by draft, to
    three digits, in what a candidate takes: a call of the draft model and a place in the target's
    forward. Measuring interleaves the models and leaves their rows unchanged. For a target in
    another program, `target` is a function of n that returns the seconds of a forward of n tokens.
    """

    def __init__(
        self, pair: Pair, target: ModelRunner | Callable[[int], float], drafts: DraftRunners
    ) -> None:
        self._pair, self._target, self._drafts = pair, target, drafts
        self.known: dict[str, float] = {}

    def target_in_candidates(self, draft: str | None = None) -> float:
        """See :class:`specdec_core.config.Costs`."""
        name = self._pair.draft_name(draft)
        if name not in self.known:
            self.known[name] = self._found(name)
        return self.known[name]

    def _found(self, name: str) -> float:
        if isinstance(self._target, ModelRunner):
            return _kept(self._pair, self._target, self._drafts, name)
        return _measured(self._pair, self._target, self._drafts, name)


def _kept(pair: Pair, target: ModelRunner, drafts: DraftRunners, name: str) -> float:
    timed = partial(time_forward, target)
    if name not in pair.fingerprints:  # a model that was made here, and is nowhere else
        return _measured(pair, timed, drafts, name)
    weights = [pair.fingerprints[TARGET], pair.fingerprints[name]]
    runner = pair.spec.runner.model_dump(mode="json", exclude={"max_length"})
    run_by = type(target).__name__  # a target may be split among processes
    facts = json.dumps(["candidates", weights, runner, run_by, machine()], sort_keys=True)
    kept = kept_folder("costs") / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with alone(kept):
            if not kept.exists():
                write_atomically(kept, str(_measured(pair, timed, drafts, name)))
        return float(kept.read_text())
    except OSError as error:
        log.warning("%s: what a target forward costs cannot be kept: %s", kept.parent, error)
        return _measured(pair, timed, drafts, name)


def _measured(pair: Pair, target: Callable[[int], float], drafts: DraftRunners, name: str) -> float:
    if name in pair.draft_models:
        own = drafts.open(name)
    else:
        own = pair.open_alone(name, 1)
        own.prefill([0], [[1]])  # a head does not read a text's first token
    seconds: list[tuple[float, float, float]] = []
    for _ in range(_REPEATS):
        times = target(1), target(1 + CANDIDATES), time_forward(own, 1)
        seconds.append(times)
    alone, more, of_draft = map(statistics.median, zip(*seconds[2:], strict=True))
    place = max(more - alone, 0.0) / CANDIDATES
    return float(f"{alone / (of_draft + place):.3g}")
