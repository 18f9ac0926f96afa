"""Find the trained heads for a draft of a pair."""

from __future__ import annotations

from collections.abc import Collection

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Sampling
from specdec_core.drafting.heads.storage import BUNDLED, CARD, load_card


def find_heads(
    kinds: Collection[str], draft_fingerprint: str, target_fingerprint: str, sampling: Sampling
) -> list[str]:
    """Names of the heads of these `kinds`, in the workspace and bundled, that were trained for the
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
