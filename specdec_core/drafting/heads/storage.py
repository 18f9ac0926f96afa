"""A head's folder: `model.safetensors` and `head.json`. A head loads only for its own pair."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.files import atomic_path, write_atomically
from specdec_core.base.workspace import present_path, workspace
from specdec_core.config import Sampling, parse_json
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.heads.modules import Head, build_head
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import Pair

BUNDLED = Path(__file__).parents[2] / "bundled" / "heads"
WEIGHTS, CARD = "model.safetensors", "head.json"


def weights_of(head: Head) -> bytes:
    """The head's weights as a safetensors file: its matrices in half precision, the mean and scale
    of its inputs in full."""
    state = {name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}
    return save({name: t.half() if t.ndim > 1 else t for name, t in state.items()})


def save_head(head: Head | bytes, card: HeadCard, folder: Path) -> HeadCard:
    """Write a head, or its :func:`weights_of`, and its card into `folder`; returns the card as
    written. The card comes last and has the digest of the weights, so a torn folder is detected."""
    weights = head if isinstance(head, bytes) else weights_of(head)
    card = card.model_copy(update={"weights": hashlib.sha256(weights).hexdigest()})
    with atomic_path(folder / WEIGHTS) as path:
        path.write_bytes(weights)
    write_atomically(folder / CARD, card.model_dump_json(indent=1))
    return card


def resolve_head(name: str) -> Path:
    """The folder of a head: `bundled:<name>`, a path, or the name of one in the workspace."""
    if name.startswith("bundled:"):
        return BUNDLED / name.removeprefix("bundled:")
    folder = Path(present_path(name))
    if os.sep in name or (folder / CARD).exists():
        return folder
    return workspace() / "heads" / name


def load_card(name: str | Path) -> HeadCard:
    """The card of a head by name or folder. Raises :class:`UserError` where there is none, or it
    cannot be read."""
    file = resolve_head(str(name)) / CARD
    try:
        return parse_json(HeadCard, file.read_bytes(), f"{file}: not a head's card")
    except OSError:
        known = sorted(path.parent.name for path in file.parents[1].glob(f"*/{CARD}"))
        there = f"there are {', '.join(known)}" if known else "`specdec train head` makes one"
        raise UserError(f"no head {name} ({file.parent}); {there}") from None


def find_heads(
    kinds: Collection[str], draft_fingerprint: str, target_fingerprint: str, sampling: Sampling
) -> list[str]:
    """Names of the heads, in the workspace and bundled, with one of the `kinds` and trained for the
    models with these fingerprints under this sampling. Heads with unreadable cards are skipped."""
    pair = {"draft": draft_fingerprint, "target": target_fingerprint}
    names = []
    for prefix, root in (("", workspace() / "heads"), ("bundled:", BUNDLED)):
        for file in sorted(root.glob(f"*/{CARD}")):
            try:
                card = load_card(file.parent)
            except UserError:
                continue
            trained_for_pair = pair.items() <= card.pair.items()
            if card.kind in kinds and card.sampling == sampling and trained_for_pair:
                names.append(prefix + file.parent.name)
    return names


def load_head(
    name: str | Path,
    draft_fingerprint: str,
    target_fingerprint: str,
    device: str = "cpu",
) -> LoadedHead:
    """A trained head by name or folder, ready to predict on `device`. Raises :class:`UserError`
    for a head that is missing, has broken files, or was trained for another draft or target."""
    card = load_card(name)
    for role, fingerprint in (("draft", draft_fingerprint), ("target", target_fingerprint)):
        if card.pair.get(role) != fingerprint:
            raise UserError(
                f"head {name} was trained for another {role} model (weights "
                f"{str(card.pair.get(role))[:12]}, this pair's are {fingerprint[:12]}); "
                "train one on a recording of this pair"
            )
    file = resolve_head(str(name)) / WEIGHTS
    head = build_head(card.kind, card.hidden_size, card.top_k, card.depth, card.width)
    try:
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != card.weights:
            raise UserError(f"{file}: not the weights that {CARD} describes; train the head again")
        head.load_state_dict(load(content))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {os_reason(error)}") from None
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise UserError(f"{file}: not this head's weights: {reason}") from None
    return LoadedHead(head, card, device)


def load_pair_head(pair: Pair, draft: str | None, name: str) -> LoadedHead:
    """A trained head for a draft of `pair`, on the device of that draft's outputs. Raises
    :class:`UserError` for a head of another pair."""
    draft = pair.draft_name(draft)
    weights, device = pair.fingerprints, next(pair.drafts[draft].parameters()).device
    on = "cpu" if device.type == "meta" else str(device)  # another process has the draft
    return load_head(name, weights[draft], weights[TARGET], on)
