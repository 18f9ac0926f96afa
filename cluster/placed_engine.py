"""An engine with its models on the devices of a placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from cluster.draft_actor import LOADING, PlacedDraft
from cluster.placement import place
from cluster.sharded_target.sharded_pair import load_sharded
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.engine import Engine
from specdec_core.engine.scheduler import Limits


@contextmanager
def placed_engine(
    spec: PairSpec, configuration: Configuration, limits: Limits, placement: Placement
) -> Iterator[Engine]:
    """An engine with the target on the devices of `placement` and, for asynchronous drafting, the
    draft on another. The devices are released at the end.

    Raises:
        UserError: the pair, the placement or both together are wrong.
    """
    check_models(spec, configuration, placement)
    with ExitStack() as stack:
        placed = place(placement)
        stack.callback(placed.remove)
        pair = load_sharded(spec, placed, drafts=configuration.drafts_itself)
        stack.callback(pair.group.close)
        open_link: Callable[[], Link] = no_link
        if configuration.asynchronous:
            draft = PlacedDraft(placed, pair.spec)
            stack.callback(draft.close)
            open_link = draft.wait
        engine = Engine(pair, configuration, open_link=open_link, limits=limits)
        if engine.drafter is not None:
            engine.drafter.prepare(LOADING)
        yield engine


def check_models(
    spec: PairSpec, configuration: Configuration, placement: Placement | None = None
) -> None:
    """Raises :class:`UserError` where the pair lacks a draft of the configuration, or `placement` a
    device for asynchronous drafting."""
    if configuration.asynchronous and (placement is None or not placement.draft.devices):
        raise UserError(
            f"{configuration.label} drafts on a device of its own: say which, with --cluster and a"
            " placement that has one for the draft"
        )
    if configuration.asynchronous and configuration.unpriced:
        raise UserError(
            f"{configuration.label}: policy.target_cost: profile: a draft on a device of its own"
            " cannot be timed beside the target; give a number"
        )
    known = ", ".join(spec.drafts) or "none"
    for draft in configuration.drafts:
        if not spec.drafts or draft not in (None, *spec.drafts):
            needed = "a draft" if draft is None else f"draft {draft!r}"
            raise UserError(f"the configuration needs {needed}, the pair's drafts are: {known}")
