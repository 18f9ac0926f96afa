"""Planned trees against a grid of all, replayed on a recording: does the planner find the best?"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from research.plan_tree.tree_plan import PlannedTree, StaticTrees, uniform_tree
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.cost import Profile
from specdec_core.drafting.tree.settings import TreeSettings
from specdec_core.search.space import k_configurations

if TYPE_CHECKING:  # torch takes seconds to import
    from specdec_core.recordings.replay import Replay

CHAIN, GRID, PLANNED = KINDS = ("chain", "grid", "planned")


@dataclass(frozen=True)
class TreeComparison:
    """Trees of one draft on one recording.

    `grid` has one row for each k-configuration within the budget. `budgets` has one row for each
    budget and kind: the best chain and the best of the grid by replay, and the planner's choice,
    made from acceptance rates and the profile alone. Columns: `draft`, `shape`, `nodes`, `depth`,
    `expected` (tokens a round, by the planner's model), `mat` (by replay), `speedup` (modelled by
    the profile from replayed counts), and `branching` as in a configuration. `proposed` is the
    fastest by replay of all planned trees.
    """

    draft: str
    acceptance: np.ndarray  # by rank
    grid: pd.DataFrame
    budgets: pd.DataFrame
    proposed: dict[str, Any]  # a row

    @property
    def configuration(self) -> Configuration:
        """The proposed tree, to search around or to serve."""
        return Configuration(
            drafter=TreeSettings(draft=self.draft, branching=self.proposed["branching"])
        )

    def best(self, kind: str) -> dict[Hashable, Any]:
        """The fastest of a kind by replay."""
        rows = self.budgets[self.budgets["kind"] == kind]
        return rows.iloc[rows["speedup"].argmax()].to_dict()


def budgets_up_to(nodes: int) -> list[int]:
    """The budgets compared: densest where another node matters most."""
    steps = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    return sorted({*(step for step in steps if step < nodes), nodes})


def compare_trees(
    replay: Replay,
    profile: Profile,
    draft: str | None = None,
    nodes: int = 32,
    depth: int = 10,
    observer: Observer | None = None,
) -> TreeComparison:
    """Plan trees of at most `nodes` nodes and `depth` levels from the recorded acceptance rates;
    replay them and every k-configuration.

    Raises :class:`UserError` where the recording has no such draft or is not greedy.
    """
    name = replay.recording.draft_name(draft)
    observer, context = observer or Observer(), replay.recording.prompts.context
    acceptance = replay.track(name).acceptance(nodes)
    shapes = [uniform_tree(acceptance, b) for b in k_configurations(nodes, depth)]
    planner = StaticTrees(acceptance, nodes, depth)
    candidates = planner.candidates()
    observer.stage(f"replaying trees of {name}", len({*shapes, *candidates}))

    @cache
    def row(tree: PlannedTree) -> dict[str, Any]:
        drafter = TreeSettings(draft=name, branching=tree.children)
        configuration = Configuration(drafter=drafter, sampling=replay.header.sampling)
        counts = replay.run(configuration).counts
        observer.step()
        return {
            "draft": name,
            "shape": tree.label,
            "nodes": tree.nodes,
            "depth": tree.depth,
            "expected": 1 + tree.expected,
            "mat": counts.metrics()["mat"],
            "speedup": profile.speedup(counts, name, context),
            "branching": drafter.branching,
        }

    def seconds(tree: PlannedTree) -> float:
        return profile.round_seconds(tree.nodes, tree.depth, tree.draft_tokens, name, context)

    grid = pd.DataFrame(map(row, shapes))
    rows = []
    for budget in budgets_up_to(nodes):
        within = grid[grid["nodes"] <= budget]
        chains = within[within["nodes"] == within["depth"]]
        for kind, trees in ((CHAIN, chains), (GRID, within)):
            best = trees.iloc[trees["speedup"].argmax()]
            rows.append({"draft": name, "kind": kind, "budget": budget, **best})
        planned = row(planner.fastest(seconds, budget))
        rows.append({"draft": name, "kind": PLANNED, "budget": budget, **planned})
    proposed = max(map(row, candidates), key=lambda each: each["speedup"])
    return TreeComparison(name, acceptance, grid, pd.DataFrame(rows), proposed)
