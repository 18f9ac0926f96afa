"""A pair, and an engine, with the models on the devices of a placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cluster.draft_actor import LOADING
from cluster.session import ray_session
from cluster.sharded_target.shard_weights import check_target
from cluster.sharded_target.sharded_pair import sharded_pair
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.engine import Engine
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import APART, Pair, eagle_heads_of, load_pair


@contextmanager
def loaded_pair(
    spec: PairSpec, placement: Placement | None, configurations: Iterable[Configuration] = ()
) -> Iterator[Pair]:
    """The pair, to be decoded by `configurations`, with its models in this process or on the
    devices of `placement`, which are released at the end.

    Raises:
        UserError: the pair, the placement, a configuration or all together are wrong.
    """
    for configuration in configurations:
        check_models(spec, configuration, placement)
    if placement is None:
        yield load_pair(spec)
        return
    check_placement(spec, placement, ())
    with ray_session(), sharded_pair(spec, placement) as pair:
        yield pair


@contextmanager
def placed_engine(
    spec: PairSpec, configuration: Configuration, limits: Limits, placement: Placement
) -> Iterator[Engine]:
    """An engine with the target on the devices of `placement`, and the draft on another if it has
    one. The devices are released at the end. Raises :class:`UserError` as :func:`loaded_pair`."""
    with loaded_pair(spec, placement, [configuration]) as pair:
        engine = Engine(pair, configuration, limits=limits)
        if engine.drafter is not None:
            engine.drafter.prepare(LOADING)
        yield engine


def check_models(
    spec: PairSpec, configuration: Configuration, placement: Placement | None = None
) -> None:
    """Raises :class:`UserError` where the pair lacks a draft of the configuration, or `placement` a
    device for asynchronous drafting, or where the target cannot be split as that asks."""
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
    configuration.check_drafts(spec.drafts, configuration.label)
    if placement is not None:
        check_placement(spec, placement, [configuration])


def check_placement(
    spec: PairSpec, placement: Placement, configurations: Iterable[Configuration]
) -> None:
    """Raises :class:`UserError` where the target cannot be split as `placement` asks, or a draft of
    `configurations` cannot draft for a placed target."""
    check_target(spec, placement.target)
    heads = eagle_heads_of(spec)
    for configuration in configurations:
        for apart in sorted(configuration.drafts_of(spec.drafts).keys() & {*heads}):
            raise UserError(f"{configuration.label}: draft {apart}: {APART}")
