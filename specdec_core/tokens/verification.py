"""The one place where a candidate is accepted or rejected.

At a node of the token tree the children are tried in the order drawn. Child y, drawn from q, is
accepted with probability min(1, p(y)/q(y)); a rejection leaves p ← norm(max(p − q, 0)) for its
siblings. When all are rejected the next token is drawn from what is left of p, when none was drawn
from p itself (Leviathan et al., 2023; SpecDec++, Alg. 2; SpecInfer for siblings). The output then
has exactly the target's distribution. Greedy decoding is equality with the target's argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.tokens.sampling import RandomStream, draw
from specdec_core.tokens.token_tree import ROOT, RemoteDistribution, TokenTree


@dataclass(slots=True)
class Verdict:
    """The accepted nodes from the root on, and the target's own token after them."""

    path: list[int]
    token: int | None  # None: the target has not read the end of the path
    corrected: bool  # the token replaces a rejected candidate; otherwise it is a bonus
    left: Tensor | None = None  # the distribution that the token was drawn from, when sampling


def verify_greedy(tree: TokenTree, argmax: Sequence[int], start: int = ROOT) -> Verdict:
    """`argmax[0]` is the target's choice after the committed text, `argmax[i + 1]` after node i.
    Verification begins below node `start`."""
    children = tree.children()
    path: list[int] = []
    node, read = start, tree.read
    while True:
        if node >= read:
            return Verdict(path, None, corrected=False)
        wanted = argmax[node + 1]
        tried = children.get(node, [])
        match = next((child for child in tried if tree.tokens[child] == wanted), None)
        if match is None:
            return Verdict(path, wanted, corrected=bool(tried))
        path.append(match)
        node = match


def verify_sampled(
    tree: TokenTree,
    target_probs: Tensor,
    random: RandomStream,
    start: int = ROOT,
    known: Sequence[tuple[float, float]] | None = None,
) -> Verdict:
    """`target_probs` (nodes + 1, vocabulary): after the committed text, then after each node.
    Verification begins below node `start`. `known` are the tree's :func:`chances`; unset, a CPU
    looks them up one by one."""
    children = tree.children()
    path: list[int] = []
    node, read = start, tree.read
    if known is None and target_probs.device.type != "cpu":
        # Reading numbers one by one would make the host wait for the device each time.
        known = chances(tree, target_probs)
    while True:
        if node >= read:
            return Verdict(path, None, corrected=False)
        left = target_probs[node + 1]
        tried = children.get(node, [])
        for number, child in enumerate(tried):
            token, q = tree.tokens[child], tree.draft_probs[child]
            if known is not None:
                p_token, q_token = known[child]
                p_token = float(left[token]) if number else p_token
            else:
                p_token, q_token = float(left[token]), chance(q, token)
            if random.uniform() * q_token < p_token:
                path.append(child)
                node = child
                break
            left = residual(left, token, q)
        else:
            [drawn] = draw(left[None], [random.uniform()])
            return Verdict(path, drawn, corrected=bool(tried), left=left)


def chances(tree: TokenTree, target_probs: Tensor) -> list[tuple[float, float]]:
    """For every node the probabilities p(y) and q(y) of its token y, p before anything at its place
    was rejected; with a single copy from the device."""
    if not len(tree):
        return []
    places = [parent + 1 for parent in tree.parents]
    p = target_probs[places, tree.tokens]
    q = [
        probs[token] if isinstance(probs, Tensor) else p.new_tensor(chance(probs, token))
        for probs, token in zip(tree.draft_probs, tree.tokens, strict=True)
    ]
    return list(zip(*torch.stack([p, torch.stack(q).to(p)]).tolist(), strict=True))


def chance(q: Tensor | RemoteDistribution | None, token: int) -> float:
    """q(`token`)."""
    if isinstance(q, RemoteDistribution):
        return q.probability
    return 1.0 if q is None else float(q[token])


def longest(starts: Sequence[int], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict with the longest path; the first of equals (improved MCSD, §3.1). Verdict i is on
    the tree below node `starts[i]`, a token that the target has drawn, which joins the path. With
    several such tokens this choice does not keep the target's distribution."""
    best = max(range(len(starts)), key=lambda i: len(verdicts[i].path))
    verdict = verdicts[best]
    return Verdict([starts[best], *verdict.path], verdict.token, verdict.corrected, verdict.left)


def residual(p: Tensor, token: int, q: Tensor | RemoteDistribution | None) -> Tensor:
    """norm(max(p − q, 0)) for a rejected `token` drawn from `q` (None: one-hot)."""
    if q is None:
        left = p.clone()
        left[token] = 0
    else:
        q = q.fetch().to(p.device) if isinstance(q, RemoteDistribution) else q
        left = p.clone()
        left[: len(q)] -= q  # a draft model may lack the target's padding entries
        left.clamp_(min=0)
    total = left.sum()
    # p = q up to rounding: a rejection then has probability 0 but for that rounding.
    return torch.where(total > 0, left / total, p)
