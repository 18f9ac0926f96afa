"""What the parts of decoding with Post-use & Pre-cut take (its Table 9), measured live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pandas as pd

from specdec_core.config import Configuration
from specdec_core.drafting.chain import LiveChainModel
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.post_use.drafter import PostUseDrafter
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts

M_D, M_T = "M_d forward", "M_t forward"
CACHE, ROLL_BACK, CONTROLLER = "cache fetch and verify", "roll back", "controller step"
REST = "everything else"
METHOD = PostUseSettings(policy=PreCutSettings(max_tokens=24))


@dataclass
class _Watch:
    """The seconds and calls of some functions; where they call each other, the outermost's."""

    seconds: float = 0.0
    calls: int = 0
    running: bool = False

    def over(self, owner: Any, *names: str) -> None:
        """Measure these methods of `owner` from now on."""
        for name in names:
            setattr(owner, name, self._measured(getattr(owner, name)))

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.running:
                return call(*args, **kwargs)
            self.running, start = True, perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.running = False
                self.seconds += perf_counter() - start
                self.calls += 1

        return measured


def component_times(
    pair: Pair, requests: Sequence[Request], drafter: PostUseSettings = METHOD
) -> tuple[pd.DataFrame, Counts]:
    """Decode `requests` one after the other and time the parts, after a first one that warms up.

    A row a `component`: `calls`, `seconds` of all of them, milliseconds of one, `each`, calls in a
    mean round, `a_round`, and the `share` of the time of all rounds but each request's first. In
    every row the `drafted` tokens of all chains, the `recycled` ones among them, which took no
    draft call, and the accepted tokens of cached phrases behind a chain, `suffixes`. And the counts
    of all rounds.

    Forwards are timed by the runners. Reading the clock takes some 0.1 µs a call, which the other
    parts include.
    """
    engine = Engine(pair, Configuration(drafter=drafter))
    engine.generate([requests[0]])
    method = engine.drafter
    assert isinstance(method, PostUseDrafter)
    assert isinstance(method.model, LiveChainModel)
    watches = {name: _Watch() for name in (CACHE, ROLL_BACK, CONTROLLER)}
    watches[CACHE].over(method, "guess", "learn", "_reuse_at_target")
    watches[CACHE].over(method.cache, "observe")
    watches[ROLL_BACK].over(method.model.runner, "keep", "truncate")
    watches[ROLL_BACK].over(engine.target, "keep", "truncate")
    watches[CONTROLLER].over(method.policy, "go_on", "observe")
    told: list[PolicyOutcome] = []
    judged = method.policy.observe

    def observe(slot: int, outcome: PolicyOutcome) -> None:
        told.append(outcome)
        judged(slot, outcome)

    method.policy.observe = observe  # type: ignore[method-assign]
    generations = engine.generate(requests)
    rounds = [r for generation in generations for r in generation.rounds[1:]]
    timed = {
        M_D: (sum(r.draft_forwards for r in rounds), sum(r.draft_forward_seconds for r in rounds)),
        M_T: (len(rounds), sum(r.target_forward_seconds for r in rounds)),
        **{name: (watch.calls, watch.seconds) for name, watch in watches.items()},
    }
    whole = sum(r.seconds for r in rounds)
    timed[REST] = len(rounds), max(whole - sum(seconds for _, seconds in timed.values()), 0.0)
    table = pd.DataFrame(
        {
            "component": name,
            "calls": calls,
            "seconds": seconds,
            "each": 1e3 * seconds / max(calls, 1),
            "a_round": calls / max(len(rounds), 1),
            "share": seconds / whole if whole else 0.0,
            "drafted": sum(outcome.drafted for outcome in told),
            "recycled": sum(outcome.drafted - outcome.draft_calls for outcome in told),
            "suffixes": sum(outcome.reused for outcome in told),
        }
        for name, (calls, seconds) in timed.items()
    )
    return table, Counts.of(generations)
