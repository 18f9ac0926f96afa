"""An engine whose models are on devices placed for them; it needs none itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cluster.pearl import PlacedDraft
from cluster.placement import place
from cluster.sharded_runner import load_sharded
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.engine import Engine
from specdec_core.pearl.link import no_link


@contextmanager
def placed_engine(
    spec: PairSpec, configuration: Configuration, slots: int, placement: Placement
) -> Iterator[Engine]:
    """The target on the devices of `placement`, and the draft on its own for configurations that
    draft beside it. The devices are given back at the end.

    Raises:
        UserError: the pair, the placement or both together are wrong.
    """
    with ExitStack() as stack:
        placed = place(placement)
        stack.callback(placed.remove)
        pair = load_sharded(spec, placed)
        stack.callback(pair.group.close)
        open_link = no_link
        if configuration.beside:
            draft = PlacedDraft(placed, pair.spec)
            stack.callback(draft.close)
            open_link = draft.wait
        yield Engine(pair, configuration, slots, open_link)
