"""The checks of a configuration that drafts on a device of its own (PEARL), on the devices placed
for target and draft."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from cluster.devices import placed_spec
from cluster.draft_actor import PlacedDraft
from cluster.placed_engine import check_models
from cluster.placement import Placed, place
from cluster.session import get, ray_session, start_actor
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.drafting.pearl.link import Link
from specdec_core.evidence.certificate.certificate import Checks
from specdec_core.evidence.certificate.certify import Extent, check_all
from specdec_core.models.pair import Pair, load_pair
from specdec_core.prompts.prompt import Prompt


class Certifier:
    """The target's process. The draft is on its own device in float32 first, then as it is
    served."""

    def __init__(self, spec: PairSpec, placed: Placed) -> None:
        self.pair, self.placed = load_pair(placed_spec(spec)), placed
        self._draft: PlacedDraft | None = None
        self._drafts_of: PairSpec | None = None

    def check(
        self, configuration: Configuration, prompts: Sequence[Prompt], extent: Extent
    ) -> Checks:
        """All checks of the configuration."""
        try:
            return check_all(self.pair, configuration, prompts, extent, Observer(), self._link)
        finally:
            self._close()

    def _link(self, pair: Pair) -> Link:
        """To a draft with the models of `pair`, one at a time."""
        if self._drafts_of != pair.spec:
            self._close()
            self._draft, self._drafts_of = PlacedDraft(self.placed, pair.spec), pair.spec
        assert self._draft is not None
        return self._draft.wait()

    def _close(self) -> None:
        if self._draft is not None:
            self._draft.close()
        self._draft = self._drafts_of = None


def check_beside(
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
    with ray_session():
        placed = place(placement)
        try:
            observer.stage("on devices of their own: greedy, sampled, and timed in turns")
            certifier = start_actor(Certifier, spec, placed, **placed.options("target"))
            checks: Checks = get(certifier.check.remote(configuration, prompts, extent))
            ray.kill(certifier)
            return checks
        finally:
            placed.remove()
