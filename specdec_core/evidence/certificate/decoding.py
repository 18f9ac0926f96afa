"""Engines that decode what is checked, also with a draft on a separate device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts, Generation

READY = 600.0  # seconds that a draft on a separate device may take to load

# Connects to a draft on a separate device, with the models of this pair.
Links = Callable[[Pair], Link]


def here_alone(pair: Pair) -> Link:
    """There is no such device. Raises :class:`UserError`."""
    return no_link()


def opened(pair: Pair, configuration: Configuration, slots: int, links: Links) -> Engine:
    """An engine with a draft that is ready: before, it would decode without candidates."""
    engine = Engine(pair, configuration, slots, open_link=partial(links, pair))
    if engine.drafter is not None and not engine.drafter.prepare(READY):
        raise UserError(f"{configuration.label}: the draft did not get ready")
    return engine


def decoded(
    pair: Pair,
    configuration: Configuration,
    requests: Sequence[Request],
    slots: int,
    observer: Observer,
    links: Links,
) -> list[Generation]:
    """The generations of `requests`, `slots` of them at a time. Raises :class:`UserError` where a
    draft that drafts meanwhile was never in time: nothing would have been checked."""
    engine = opened(pair, configuration, slots, links)
    found = engine.generate(requests, lambda _: observer.step())
    if configuration.asynchronous and not Counts.of(found).n_drafted:
        raise UserError(f"{configuration.label}: no candidate came in time, nothing was checked")
    return found
