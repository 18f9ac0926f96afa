"""The peers of each library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, distinct_labels
from specdec_core.evidence.peers.peer import Peer
from specdec_core.evidence.peers.transformers import TransformersPlugIn, transformers_peers
from specdec_core.evidence.peers.vllm import VllmMode, VllmPeer, vllm_peers
from specdec_core.models.pair import Pair, load_pair

NAMES = ("transformers", "vllm")


def peers_of(
    pair: Pair,
    names: Sequence[str],
    vllm_venv: Path | None = None,
    plug_ins: Sequence[Configuration] = (),
    ours: Sequence[VllmMode] = (),
) -> list[Peer]:
    """Every mode in which the libraries `names` can complete prompts with this pair, not yet open.

    They use the pair's model names, data types, lengths and threads, and load the models
    themselves. Behind their own modes come transformers with this library's plug-in, by each of
    `plug_ins`, and vLLM in the modes `ours`. vLLM runs from the virtual environment `vllm_venv`, by
    default the one of `make bench-peers`.

    Raises:
        UserError: a name that is not in `NAMES`.
    """
    peers: list[Peer] = []
    labels = distinct_labels(plug_ins)
    for name in names:
        if name == "transformers":
            load = cache(lambda: plain_pair(pair.spec))
            peers += transformers_peers(list(pair.draft_models), load)
            peers += [TransformersPlugIn(load, pair, c, labels[c.id]) for c in plug_ins]
        elif name == "vllm":
            peers += vllm_peers(pair, vllm_venv)
            peers += [VllmPeer(pair, mode, venv=vllm_venv) for mode in ours]
        else:
            raise UserError(f"unknown peer {name!r}; known: {', '.join(NAMES)}")
    return peers


def plain_pair(spec: PairSpec) -> Pair:
    """The pair as transformers loads it, its drafts in the faster data type."""
    plain = spec.runner.model_copy(update={"pack": False, "draft_dtype": "auto"})
    return load_pair(spec.model_copy(update={"runner": plain}))
