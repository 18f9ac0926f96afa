"""The weights of models on a cluster's nodes: the same name may stand for others there."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec
from specdec_core.models.fingerprints import TARGET


class OtherWeights(UserError):
    """A model has other weights on this node than elsewhere."""


def check_weights(
    pair: PairSpec, here: Mapping[str, str], wanted: Mapping[str, str], where: str
) -> None:
    """Raises :class:`OtherWeights` for a model of `pair` with another fingerprint on this node than
    is `wanted`, which is that in `where`. Models without a wanted one are not compared."""
    for name, weights in here.items():
        if (other := wanted.get(name, weights)) != weights:
            model = pair.target if name == TARGET else pair.drafts[name]
            raise OtherWeights(
                f"{model}: other weights on the cluster's node {ray.util.get_node_ip_address()}"
                f" than in {where} ({weights[:8]}, not {other[:8]})"
            )
