"""Trees that grow where the draft model is confident (EAGLE-2: expand, then rerank).

The confidence in a node is the product of the draft's probabilities on the way to it, which is
about the probability that the target accepts it (Li et al., "EAGLE-2: Faster inference of language
models with dynamic draft trees", 2024, there for a draft that reads the target's features).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from time import perf_counter

import torch

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.growing import Growth, Level
from specdec_core.drafting.policies.policy import PolicyOutcome, Rule
from specdec_core.drafting.policies.signals import Signals
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree


@dataclass(slots=True)
class _Values:
    """Values of the nodes of a tree."""

    limit: int  # levels that the tree may have
    scores: list[float] = field(default_factory=list)  # log confidence, from the root on
    products: list[float] = field(default_factory=list)  # the policy's values, from the root on


class DynamicTreeDrafter(Drafter):
    """Expands the most confident nodes of each level, and sends the most confident nodes of all
    levels to verification.

    The candidates are the draft's most likely tokens, so proposals are deterministic: which ones
    are tried depends on the sequence alone, and that is lossless. A node at which the length policy
    stops is not expanded; drafting ends when none is. A node with less than the `least` confidence
    is neither expanded nor sent: it is not expected to pay for its place in the forward.
    """

    def __init__(self, settings: DynamicTreeSettings, resources: Resources) -> None:
        self.settings = settings
        self.context = DraftContext(resources.draft_runner(settings.draft))
        self.policy = resources.policy(settings.draft, settings.policy)
        self.eos_token_ids = resources.eos_token_ids
        self.least = math.log(settings.least) if settings.least else -math.inf
        self._cached: dict[int, dict[int, int]] = {}  # by slot
        self.clock = resources.clock

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        growth = Growth(self.context, sequences)
        values = [_Values(min(self.context.room(s), self.policy.limit(s.slot))) for s in sequences]
        wanted = {i: [ROOT] for i, tree in enumerate(values) if tree.limit > 0}
        depth = 0
        while wanted:
            level = growth.read(wanted)
            returned = perf_counter()
            candidates = self._expand(growth, values, level)
            depth += 1
            wanted = self._choose(growth, values, level, candidates, depth)
            self.clock.chose(returned, self.context.runner.device)
        trees = []
        for sequence, tree, nodes, cached in zip(
            sequences, growth.trees, values, growth.cached, strict=True
        ):
            kept = rerank(nodes.scores, self.settings.keep, self.least)
            number = {node: n for n, node in enumerate(kept)}
            trees.append(_renumbered(tree, number))
            self._cached[sequence.slot] = {number[n]: at for n, at in cached.items() if n in number}
        return trees

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.context.keep(sequence, outcome, self._cached.pop(sequence.slot))
        tree = outcome.tree
        if drafted := tree.depth:
            result = PolicyOutcome(drafted, outcome.accepted, tree.draft_forwards)
            self.policy.observe(sequence.slot, result)

    def _expand(
        self, growth: Growth, values: Sequence[_Values], level: Level
    ) -> dict[int, dict[int, int]]:
        """Add the candidates of every place of the level. Returns for each tree the new nodes, and
        the place that each follows."""
        likely = level.at.confidences()
        best = likely.topk(min(self.settings.children, likely.shape[-1]), dim=-1)
        new: dict[int, dict[int, int]] = {i: {} for i in level.trees}
        candidates = zip(
            level.trees, level.nodes, best.indices.tolist(), best.values.tolist(), strict=True
        )
        for place, (i, parent, tokens, confidences) in enumerate(candidates):
            nodes = values[i]
            score, product = (
                (nodes.scores[parent], nodes.products[parent]) if parent != ROOT else (0, 1)
            )
            for token, confidence in zip(tokens, confidences, strict=True):
                if confidence > 0:  # warped away, a token is never accepted
                    new[i][growth.trees[i].add(token, parent, TokenOrigin.DRAFT)] = place
                    nodes.scores.append(score + math.log(min(confidence, 1.0)))
                    nodes.products.append(product)
        return new

    def _choose(
        self,
        growth: Growth,
        values: Sequence[_Values],
        level: Level,
        candidates: Mapping[int, Mapping[int, int]],
        depth: int,
    ) -> dict[int, list[int]]:
        """The nodes of each tree to expand next: the most confident candidates that do not end the
        sequence, where the policy does not stop."""
        shown: list[tuple[int, int]] = []
        for i, nodes in candidates.items():
            # A policy that learns also sees what will not be expanded.
            if depth < values[i].limit or self.policy.learns:
                tokens, scores = growth.trees[i].tokens, values[i].scores
                open_ended = [
                    n
                    for n in nodes
                    if scores[n] >= self.least and tokens[n] not in self.eos_token_ids
                ]
                best = nlargest(self.settings.expand, open_ended, key=lambda n: (scores[n], -n))
                shown += [(i, node) for node in best]
        if not shown:
            return {}
        places = [candidates[i][node] for i, node in shown]
        signals = Signals(
            [growth.sequences[i].slot for i, _ in shown],
            [growth.trees[i].tokens[node] for i, node in shown],
            [depth] * len(shown),
            level.at.logits,
            level.at.probs,
            level.hidden,
            places,
        )
        before = [values[i].products[node] for i, node in shown]
        wanted: dict[int, list[int]] = {}
        answers, products = self._ask(signals, before)
        for (i, node), go, product in zip(shown, answers, products or before, strict=True):
            values[i].products[node] = product
            if go and depth < values[i].limit:
                wanted.setdefault(i, []).append(node)
        return wanted

    def _ask(self, signals: Signals, before: Sequence[float]) -> tuple[list[bool], list[float]]:
        """Ask the policy about the branches of trees, the best of a slot first. A rule judges each
        branch by the product of its values, `before` up to the candidates before. Any other policy
        follows one sequence of candidates in a slot: it sees the best one, and decides for all."""
        if isinstance(self.policy, Rule):
            return self.policy.judge(signals, before)
        first: dict[int, int] = {}
        for place, slot in enumerate(signals.slots):
            first.setdefault(slot, place)
        seen = signals.only(list(first.values()))
        decided = dict(zip(seen.slots, self.policy.go_on(seen), strict=True))
        return [decided[slot] for slot in signals.slots], []


def rerank(scores: Sequence[float], count: int, least: float = -math.inf) -> list[int]:
    """The `count` nodes with the highest scores, none below `least`, by number; of equals the
    earlier ones. Where no node scores above its parent, which comes before it, they form a
    connected tree."""
    possible = [node for node, score in enumerate(scores) if score >= least]
    return sorted(nlargest(count, possible, key=lambda node: (scores[node], -node)))


def _renumbered(tree: TokenTree, number: Mapping[int, int]) -> TokenTree:
    """The nodes of `tree` that have a `number`, which is their new one."""
    part = TokenTree(draft_forwards=tree.draft_forwards, draft_tokens=tree.draft_tokens)
    for node in number:
        parent = tree.parents[node]
        part.add(tree.tokens[node], ROOT if parent == ROOT else number[parent], TokenOrigin.DRAFT)
    return part
