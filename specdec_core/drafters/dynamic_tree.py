"""Trees that grow where the draft model is confident (EAGLE-2: expand, then rerank).

The confidence in a node is the product of the draft's probabilities on the way to it, which is
about the probability that the target accepts it (Li et al., "EAGLE-2: Faster inference of language
models with dynamic draft trees", 2024, there for a draft that reads the target's features).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest

import torch
from torch import Tensor

from specdec_core.config import DynamicTreeDrafter
from specdec_core.drafters.base import Drafter, Outcome, Resources, Sequencing
from specdec_core.drafters.context import DraftContext
from specdec_core.policies import Signals, build_policy
from specdec_core.policies.branches import Branches
from specdec_core.sampling import warp_rows
from specdec_core.stats import Origin
from specdec_core.token_tree import ROOT, TokenTree


@dataclass(slots=True)
class Growth:
    """A slot's tree while it grows: all candidates of all levels."""

    sequence: Sequencing
    limit: int  # levels
    tree: TokenTree = field(default_factory=TokenTree)
    scores: list[float] = field(default_factory=list)  # log confidence of each node
    products: list[float] = field(default_factory=list)  # the policy's, along the branch
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # nodes to expand next, best first
    fed: list[int] = field(default_factory=list)  # nodes that the draft model has read, in order
    depth: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # of the nodes kept, their place in `fed`

    def expand(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> list[int]:
        """Add candidates behind `parent`; returns their nodes. Impossible ones are left out."""
        score = 0.0 if parent == ROOT else self.scores[parent]
        nodes = []
        for token, confidence in zip(tokens, confidences, strict=True):
            if confidence > 0:
                nodes.append(self.tree.add(token, parent, Origin.DRAFT))
                self.scores.append(score + math.log(min(confidence, 1.0)))
                self.products.append(1.0 if parent == ROOT else self.products[parent])
        return nodes

    def best(self, count: int, nodes: Sequence[int] | None = None) -> list[int]:
        """The `count` most confident of `nodes` (all without them), best first; of equals the
        earlier one, so that no node goes before its parent."""
        of = range(len(self.tree)) if nodes is None else nodes
        return nlargest(count, of, key=lambda node: (self.scores[node], -node))

    def keep(self, count: int) -> TokenTree:
        """Rerank: the tree of the `count` most confident nodes. It is connected, because nobody is
        more confident in a node than in its parent."""
        kept = sorted(self.best(count))
        number = {node: n for n, node in enumerate(kept)} | {ROOT: ROOT}
        tree = TokenTree(
            draft_forwards=self.tree.draft_forwards, draft_tokens=self.tree.draft_tokens
        )
        for node in kept:
            tree.add(self.tree.tokens[node], number[self.tree.parents[node]], Origin.DRAFT)
        self.cached = {number[node]: n for n, node in enumerate(self.fed) if node in number}
        return tree


class DynamicTree(Drafter):
    """Expands the most confident nodes of each level, and sends the most confident nodes of all
    levels to verification.

    The candidates are the draft's most likely tokens, so proposals are deterministic: which ones
    are tried depends on the text alone, and that is lossless. A node that the length policy stops
    at is not expanded; drafting ends when none is.
    """

    def __init__(self, settings: DynamicTreeDrafter, resources: Resources) -> None:
        self.settings = settings
        self.runner = resources.draft_runner(settings.draft)
        self.context = DraftContext(self.runner)
        self.policy = build_policy(settings.policy, partial(resources.load_head, settings.draft))
        self.branches = Branches(self.policy)
        self.vocab_size, self.eos_token_ids = resources.vocab_size, resources.eos_token_ids
        self._growths: dict[int, Growth] = {}
        if self.policy.needs_hidden:
            self.runner.watch_hidden(True)

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)
        self.context.open(sequences)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        growths = [Growth(s, min(s.room, self.policy.limit(s.slot))) for s in sequences]
        self._growths |= {g.sequence.slot: g for g in growths}
        active = [g for g in growths if g.limit > 0]
        while active:
            logits, hidden = self._forward(active)
            asked = [g.sequence.sampling for g in active for _ in g.frontier]
            probs = warp_rows(logits, asked)
            levels = self._expand(active, logits, probs)
            self._choose(active, levels, logits, probs, hidden)
            active = [g for g in active if g.frontier]
        return [g.keep(self.settings.keep) for g in growths]

    def observe(self, sequence: Sequencing, outcome: Outcome) -> None:
        growth = self._growths.pop(sequence.slot)
        self.context.keep(sequence, outcome, growth.cached)
        if drafted := outcome.tree.depth:
            self.policy.observe(sequence.slot, drafted, outcome.accepted)

    def _forward(self, growths: list[Growth]) -> tuple[Tensor, Tensor | None]:
        """Logits (n, vocabulary) behind each node of the frontiers, one slot's after the other's,
        and what they were made from (n, dimension)."""
        rows, feed, parents = [], [], []
        for growth in growths:
            rows.append(growth.sequence.slot)
            growth.tree.draft_forwards += 1
            growth.tree.draft_tokens += len(growth.frontier)
            if growth.frontier == [ROOT]:
                feed.append(self.context.pending(growth.sequence))
                continue
            growth.fed += growth.frontier
            place = {node: n for n, node in enumerate(growth.fed)} | {ROOT: ROOT}
            feed.append([growth.tree.tokens[node] for node in growth.frontier])
            parents.append([place[growth.tree.parents[node]] for node in growth.fed])
        logits = self.runner.forward(rows, feed, parents or None)
        # Behind a text its last token counts, in a tree every one.
        firsts = [len(f) - len(g.frontier) for f, g in zip(feed, growths, strict=True)]
        flat_rows = [n for n, g in enumerate(growths) for _ in g.frontier]
        flat = [
            first + i
            for first, g in zip(firsts, growths, strict=True)
            for i in range(len(g.frontier))
        ]
        hidden = self.runner.hidden
        return (
            logits[flat_rows, flat, : self.vocab_size],
            None if hidden is None else hidden[flat_rows, flat],
        )

    def _expand(
        self, growths: list[Growth], logits: Tensor, probs: list[Tensor | None]
    ) -> list[dict[int, int]]:
        """Give every node of the frontiers its candidates. For each slot the new nodes, and which
        row of `logits` each is from."""
        places = [(g.sequence, g.depth) for g in growths for _ in g.frontier]
        likely = _confidences(logits, probs, places, self.vocab_size)
        count = min(self.settings.children, likely.shape[-1])
        best = likely.topk(count, dim=-1)
        tokens, confidences = best.indices.tolist(), best.values.tolist()
        levels, row = [], 0
        for growth in growths:
            level: dict[int, int] = {}
            for parent in growth.frontier:
                nodes = growth.expand(parent, tokens[row], confidences[row])
                level |= dict.fromkeys(nodes, row)
                row += 1
            growth.depth += 1
            levels.append(level)
        return levels

    def _choose(
        self,
        growths: list[Growth],
        levels: list[dict[int, int]],
        logits: Tensor,
        probs: list[Tensor | None],
        hidden: Tensor | None,
    ) -> None:
        """The next frontiers: of each level the most confident nodes that the policy lets go on."""
        shown: list[tuple[Growth, int, int]] = []
        for growth, level in zip(growths, levels, strict=True):
            growth.frontier = []
            # What does not fit any more is shown to a policy that learns.
            if growth.depth < growth.limit or self.policy.learns:
                open_ended = [n for n in level if growth.tree.tokens[n] not in self.eos_token_ids]
                best = growth.best(self.settings.expand, open_ended)
                shown += [(growth, node, level[node]) for node in best]
        if not shown:
            return
        rows = [row for *_, row in shown]
        q = [probs[row] for row in rows]
        signals = Signals(
            [g.sequence.slot for g, *_ in shown],
            [g.tree.tokens[node] for g, node, _ in shown],
            [g.depth for g, *_ in shown],
            logits[rows],
            None if any(own is None for own in q) else torch.stack(q),
            None if hidden is None else hidden[rows],
        )
        before = [g.products[node] for g, node, _ in shown]
        answers = zip(shown, *self.branches.go_on(signals, before), strict=True)
        for (growth, node, _), go, product in answers:
            growth.products[node] = product
            if go and growth.depth < growth.limit:
                growth.frontier.append(node)


def _confidences(
    logits: Tensor,
    probs: list[Tensor | None],
    places: Sequence[tuple[Sequencing, int]],
    vocab_size: int,
) -> Tensor:
    """How confident the draft is in each token (n, vocabulary): its probability; with coupled
    sampling that of q / E, whose largest entry is the draft's choice (specdec_core.coupling).
    `places` has the slot and the depth in its tree."""
    if all(q is None for q in probs):
        return logits.float().softmax(dim=-1)
    likely = []
    for row, ((sequence, depth), q) in enumerate(zip(places, probs, strict=True)):
        if q is None:
            q = logits[row].float().softmax(dim=-1)
        elif sequence.sampling.coupling == "gumbel":
            noise = sequence.random.noise.at(len(sequence.tokens) + depth, vocab_size)
            q = q / noise[: len(q)].to(q.device)
            q = q / q.sum()
        likely.append(q)
    return torch.stack(likely)
