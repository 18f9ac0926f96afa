"""States of version 0.1.0 name arms by the labels of that time; these are what it wrote."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.config import Configuration
from specdec_core.drafting.bandit.old_labels import old_label


@pytest.mark.parametrize(
    ("drafter", "label"),
    [
        (
            {
                "kind": "draft_model",
                "draft": "d",
                "policy": {"kind": "by_batch", "tokens": {1: 6, 2: 3}},
            },
            "d · K=6, 3 from 2 on",
        ),
        (
            {
                "kind": "draft_model",
                "draft": "d",
                "policy": {"kind": "heuristic", "transient": False, "increase": 1},
            },
            "d · lasting heuristic K₀=5 +1/-1",
        ),
        (
            {
                "kind": "draft_model",
                "draft": "d",
                "policy": {"kind": "confidence", "max_tokens": 8},
            },
            "d · confidence 0.4 ≤8",
        ),
        ({"kind": "draft_model", "draft": "d", "policy": {"kind": "svip"}}, "d · svip 0.8"),
        (
            {"kind": "draft_model", "draft": "d", "policy": {"kind": "confidence_product"}},
            "d · confidence product 0.4",
        ),
        (
            {"kind": "draft_model", "draft": "d", "policy": {"kind": "dynamic_confidence"}},
            "d · dynamic confidence from 0.4",
        ),
        (
            {
                "kind": "draft_model",
                "draft": "d",
                "policy": {
                    "kind": "pre_cut",
                    "target_cost": 5,
                    "learning_rate": 0.3,
                    "table": "x/code.json",
                },
            },
            "d · pre-cut c=5 α=0.3 from code",
        ),
        (
            {
                "kind": "draft_model",
                "draft": "d",
                "policy": {"kind": "specdecpp", "head": "h", "min_tokens": 3},
            },
            "d · SpecDec++ h h=0.7 ≥3",
        ),
        (
            {
                "kind": "draft_model",
                "draft": "d",
                "policy": {"kind": "decision", "head": "h", "cumulative": True},
            },
            "d · decision h Π 0.4",
        ),
        ({"kind": "draft_model", "draft": "d", "policy": {"kind": "oracle"}}, "d · oracle"),
        (
            {"kind": "tree", "branching": [[2], [1, 2]], "replacement": True},
            "draft · tree 5 in 2|3 replaced",
        ),
        ({"kind": "tree"}, "draft · tree 4×2×2×1"),
        ({"kind": "fork"}, "draft · fork 4 fixed K=5"),
        ({"kind": "target_tree"}, "draft · target tree 2×4×3×1×1 (lossy)"),
        ({"kind": "dynamic_tree", "least": 0.2}, "draft · dynamic tree 4×4→24 ≥0.2 fixed K=6"),
        ({"kind": "prompt_lookup"}, "prompt lookup n≤3 K=10"),
        (
            {"kind": "suffix", "memory": "all", "tree": True, "min_match": 3, "per_match": 1.5},
            "suffix tree of all ≥3 ×1.5 K=10",
        ),
        ({"kind": "retrieval", "datastore": "x/own"}, "retrieval own →16 K=10"),
        (
            {"kind": "token_cache", "learn_from": "output", "from_prompt": True},
            "token cache output + prompt 4×5",
        ),
        ({"kind": "lookahead", "from_prompt": False}, "lookahead W=5 N=4 G=5 without the prompt's"),
        ({"kind": "cascade"}, "draft · fixed K=5 ← prompt lookup n≤3 K=4"),
        ({"kind": "post_use"}, "draft · fixed K=12 + token cache (draft 3×5, target 3×3×5)"),
        ({"kind": "ouroboros"}, "draft · ouroboros K=12 + 3×5"),
        (
            {"kind": "hybrid", "merge": True, "extend": True},
            "suffix K=10 ≥2 + draft · fixed K=5 extended",
        ),
        (
            {"kind": "pearl", "width": 4, "least": 0.2, "wait": 0},
            "PEARL · draft · fixed K=5 ≤12 wait 0 width 4 from 0.2",
        ),
        (
            {
                "kind": "bandit",
                "rule": "exp3",
                "reward": "time",
                "exploration": 0.5,
                "memory": "request",
                "arms": [1, {"kind": "suffix"}],
            },
            "EXP3Spec ×0.5 by time per request of draft · fixed K=1, suffix K=10",
        ),
    ],
)
def test_an_arm_is_found_by_what_it_was_called(drafter: dict[str, Any], label: str) -> None:
    assert old_label(Configuration.model_validate({"drafter": drafter}).drafter) == label
