"""A bench whose target and draft are on the devices of a placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray

from cluster.devices import placed_spec
from cluster.draft_actor import LOADING, PlacedDraft
from cluster.placement import Placed, place
from cluster.session import get, start_actor
from cluster.sharded_target.sharded_pair import load_sharded
from cluster.sweep.timing import Bench
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.drafting.pearl.drafter import PearlDrafter
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.drafting.pearl.timeline import TimelineSpan
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair


class PlacedBench(Bench):
    """A bench with the target on the devices placed for it, and the draft on another."""

    def __init__(self, spec: PairSpec, placed: Placed) -> None:
        if placed.placement.target.devices == 1:
            self.pair = load_pair(placed_spec(spec))
        else:
            self.pair = load_sharded(spec, placed)
        open_link: Callable[[], Link] = no_link
        if placed.placement.draft.devices:
            open_link = PlacedDraft(placed, self.pair.spec).wait
        self.engine = Engine(self.pair, open_link=open_link)
        self.drafters = {}

    def warm_up(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Also wait for the draft to have its graphs: until then decoding is autoregressive."""
        for configuration in configurations:
            if configuration.asynchronous:
                self.engine.configure(configuration)
                drafter = self.engine.drafter
                if drafter is None or not drafter.prepare(LOADING):
                    raise UserError(f"{configuration.label}: the draft did not get ready")
        super().warm_up(configurations, request)

    def record(self, configuration: Configuration, request: Request) -> list[TimelineSpan]:
        """The spans of draft and target while `request` was decoded."""
        self.decode(configuration, request)
        spans = self._drafter.spans = []
        self.decode(configuration, request)
        self._drafter.spans = None
        return spans

    @property
    def _drafter(self) -> PearlDrafter:
        """The engine's drafter, of a PEARL configuration."""
        assert isinstance(self.engine.drafter, PearlDrafter)
        return self.engine.drafter


@contextmanager
def placed_bench(
    spec: PairSpec, placement: Placement
) -> Iterator[tuple[ray.actor.ActorHandle, Mapping[str, float]]]:
    """A loaded bench on the devices of `placement`, and how many CPU cores these take, by node."""
    placed = place(placement)
    try:
        # A target on several devices has a process on each; this one then needs none.
        alone = placement.target.devices == 1
        options = placed.options("target") if alone else {"num_cpus": 0}
        bench = start_actor(PlacedBench, spec, placed, **options)
        get(bench.spec.remote())
        yield bench, placed.cores()
        ray.kill(bench)
    finally:
        placed.remove()
