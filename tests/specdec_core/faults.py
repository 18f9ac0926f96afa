"""Faults of verification that tests inject."""

from collections.abc import Sequence

from specdec_core.tokens.token_tree import TokenTree
from specdec_core.tokens.verification import Verdict


def accepts_all(tree: TokenTree, argmax: Sequence[int]) -> Verdict:
    """Every candidate of a chain, whatever the target's choices are."""
    path = list(range(tree.read))
    return Verdict(path, argmax[len(path)], corrected=False)
