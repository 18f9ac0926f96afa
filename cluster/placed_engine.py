"""An engine whose models are on devices placed for them; it needs none itself."""

from __future__ import annotations

from cluster.pearl import PlacedDraft
from cluster.placement import place
from cluster.sharded_runner import load_sharded
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.engine import Engine
from specdec_core.pearl.link import no_link


def placed_engine(
    spec: PairSpec, configuration: Configuration, slots: int, placement: Placement
) -> Engine:
    """The target on the devices of `placement`, and the draft on its own for configurations that
    draft beside it. The devices are this process's until it ends.

    Raises:
        UserError: the pair, the placement or both together are wrong.
    """
    placed = place(placement)
    pair = load_sharded(spec, placed)
    open_link = PlacedDraft(placed, pair.spec).wait if configuration.beside else no_link
    return Engine(pair, configuration, slots, open_link)
