"""A bench with its target and draft on the devices of a placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cluster.devices import placed_spec
from cluster.draft_actor import LOADING, PlacedDraft
from cluster.placed_engine import check_models
from cluster.placement import Placed, place
from cluster.session import Remote, ray_session, start_actor
from cluster.sharded_target.sharded_pair import ShardedPair, load_sharded
from cluster.sweep.bench import Bench
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.engine import Engine, Request
from specdec_core.evidence.certificate.certificate import Checks
from specdec_core.evidence.certificate.certify import Extent, check_all
from specdec_core.models.pair import Pair, load_pair
from specdec_core.prompts.prompt import Prompt


class PlacedBench(Bench):
    """A bench with the target on the devices placed for it, and the draft on another."""

    def __init__(self, spec: PairSpec, placed: Placed) -> None:
        self.placed = placed
        self.draft: PlacedDraft | None = None
        open_link: Callable[[], Link] = no_link
        if placed.placement.target.devices == 1:
            self.pair = load_pair(placed_spec(spec))
        else:
            self.pair = load_sharded(spec, placed)
        if placed.placement.draft.devices:
            open_link = lambda: self._link(self.pair)  # noqa: E731
        self.engine = Engine(self.pair, open_link=open_link)
        self.drafters = {}

    def _link(self, pair: Pair) -> Link:
        """A link to a draft with the models of `pair`. The device has one draft at a time."""
        if isinstance(pair, ShardedPair):
            return pair.draft.wait()
        if self.draft is not None and self.draft.spec != pair.spec:
            self.draft.close()
            self.draft = None
        self.draft = self.draft or PlacedDraft(self.placed, pair.spec)
        return self.draft.wait()

    def prepare(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Also wait for the draft to have its graphs: until then decoding is autoregressive."""
        for configuration in configurations:
            if configuration.asynchronous:
                self.engine.configure(configuration)
                drafter = self.engine.drafter
                if drafter is None or not drafter.prepare(LOADING):
                    raise UserError(f"{configuration.label}: the draft did not get ready")
        super().prepare(configurations, request)

    def check(
        self, configuration: Configuration, prompts: Sequence[Prompt], extent: Extent
    ) -> Checks:
        """All checks of a configuration: with models in float32 first, then as they are served."""
        return check_all(self.pair, configuration, prompts, extent, Observer(), self._link)


@contextmanager
def placed_bench(
    spec: PairSpec, placement: Placement
) -> Iterator[tuple[Remote, Mapping[str, float]]]:
    """A loaded bench on the devices of `placement`, and the number of CPU cores that these take, by
    node."""
    placed = place(placement)
    try:
        # A target on several devices has a process on each; this one then needs none.
        alone = placement.target.devices == 1
        options = placed.options("target") if alone else {"num_cpus": 0}
        bench = Remote(start_actor(PlacedBench, spec, placed, **options))
        bench.spec()
        yield bench, placed.cores()
        bench.kill()
    finally:
        placed.remove()


def check_placed(
    spec: PairSpec,
    configuration: Configuration,
    placement: Placement | None,
    prompts: Sequence[Prompt],
    extent: Extent,
    observer: Observer,
) -> Checks:
    """Check a configuration with the target on one device of `placement` and the draft on another.

    Raises:
        UserError: the pair or the placement is wrong for that.
    """
    check_models(spec, configuration, placement)
    assert placement is not None
    if placement.target.devices != 1:
        raise UserError(
            f"the target is on {placement.target.devices} devices: it is checked on one,"
            " `target: {devices: 1}`"
        )
    with ray_session(), placed_bench(spec, placement) as (bench, _):
        observer.stage("on separate devices: greedy, sampled, and timed interleaved")
        checks: Checks = bench.check(configuration, prompts, extent)
        return checks
