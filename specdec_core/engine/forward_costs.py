"""What a target forward costs in steps of a draft model, measured before the first request.

It is measured once for a pair on its devices, and kept for all processes and workspaces: length
policies depend on it, so a later process with the same seed gives the same output. For a target in
another program it is measured in each process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from specdec_core.base.environment import machine
from specdec_core.base.files import made_once, write_atomically
from specdec_core.base.names import digest_name
from specdec_core.base.workspace import kept_folder
from specdec_core.config import CANDIDATES
from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner, time_forward

log = logging.getLogger(__name__)

_FORMAT = 2  # of what is kept
_REPEATS = 15  # other programs make a forward slower, never faster: the fastest counts


class MeasuredForward(NamedTuple):
    """A target forward of one token, to three digits: in `calls` of a draft model,
    c = t_target / t_draft (Post-use & Pre-cut, §5.2), and in `candidates`; a candidate takes
    t_draft and a place in the target's forward."""

    calls: float
    candidates: float


class ForwardCosts:
    """The cost of a target forward beside the runners of a pair's drafts: `known`, by draft.
    Measuring interleaves the models and leaves their rows unchanged. For a target in another
    program, `target` is a function of n that returns the seconds of a forward of n tokens.
    """

    def __init__(
        self, pair: Pair, target: ModelRunner | Callable[[int], float], drafts: DraftRunners
    ) -> None:
        self._pair, self._target, self._drafts = pair, target, drafts
        self.known: dict[str, MeasuredForward] = {}

    def target_cost(self, draft: str | None = None) -> float:
        """See :class:`specdec_core.config.Costs`."""
        return self._of(draft).calls

    def target_in_candidates(self, draft: str | None = None) -> float:
        """See :class:`specdec_core.config.Costs`."""
        return self._of(draft).candidates

    def _of(self, draft: str | None) -> MeasuredForward:
        name = self._pair.draft_name(draft)
        if name not in self.known:
            # A model that was made here is nowhere else.
            lasting = isinstance(self._target, ModelRunner) and name in self._pair.fingerprints
            self.known[name] = self._kept(name) if lasting else self._measured(name)
        return self.known[name]

    def _kept(self, name: str) -> MeasuredForward:
        pair = self._pair
        weights = [pair.fingerprints[TARGET], pair.fingerprints[name]]
        runner = pair.spec.runner.model_dump(mode="json", exclude={"max_length"})
        placed = pair.placement and pair.placement.model_dump(mode="json")
        facts = json.dumps([_FORMAT, weights, runner, placed, machine()], sort_keys=True)
        kept = kept_folder("costs") / f"{digest_name(facts)}.json"
        try:
            made_once(kept, lambda: write_atomically(kept, json.dumps(self._measured(name))))
            return MeasuredForward(*json.loads(kept.read_text()))
        except OSError as error:
            log.warning("%s: what a target forward costs cannot be kept: %s", kept.parent, error)
            return self._measured(name)

    def _measured(self, name: str) -> MeasuredForward:
        timed = self._target
        if isinstance(timed, ModelRunner):
            timed = partial(time_forward, timed)
        if name in self._pair.draft_models:
            own = self._drafts.open(name)
        else:
            own = self._pair.open_alone(name, 1)
            own.prefill([0], [[1]])  # a head does not read a text's first token
        seconds = [(timed(1), timed(1 + CANDIDATES), time_forward(own, 1)) for _ in range(_REPEATS)]
        alone, more, of_draft = map(min, zip(*seconds, strict=True))
        place = max(more - alone, 0.0) / CANDIDATES
        costs = (alone / each for each in (of_draft, of_draft + place))
        return MeasuredForward(*(float(f"{cost:.3g}") for cost in costs))
