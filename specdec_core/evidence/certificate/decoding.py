"""Decoding what is checked, also with a draft on a separate device."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.measure.losses import again_if_lost
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts, Generation


def decoded(
    pair: Pair,
    configuration: Configuration,
    requests: Sequence[Request],
    slots: int,
    observer: Observer,
) -> list[Generation]:
    """The generations of `requests`, `slots` of them at a time. Raises :class:`UserError` where a
    draft that drafts meanwhile was never in time: nothing would have been checked."""

    def decode() -> list[Generation]:
        engine = Engine(pair, configuration, slots)
        engine.wait_for_draft()
        with pair.undisturbed():
            return engine.generate(requests, lambda _: observer.step())

    found = again_if_lost(decode, observer)
    if configuration.asynchronous and not Counts.of(found).n_drafted:
        raise UserError(f"{configuration.label}: no candidate came in time, nothing was checked")
    return found
