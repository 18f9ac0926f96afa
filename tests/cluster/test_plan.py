"""A sweep file is checked in full, and every mistake is one line that names file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.plan import Plan, load_plan
from specdec_core.errors import UserError

SWEEPS = Path(__file__).parents[2] / "jobs" / "sweeps"
FIXED = {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": [2, 4]}}}
LOOKUP = {"drafter": {"kind": "prompt_lookup"}}


def write(folder: Path, **content: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"search": [FIXED], **content}))
    return path


def test_quick_tries_every_policy_with_every_draft_and_prompt_lookup() -> None:
    configurations = load_plan(SWEEPS / "quick.yaml").configurations()
    assert configurations is not None
    assert len(configurations) >= 24
    tried = {(c.family, getattr(c.drafter, "draft", None)) for c in configurations}
    assert tried == {
        *(
            (p, d)
            for p in ("fixed", "heuristic", "confidence", "svip")
            for d in ("medium", "small")
        ),
        ("prompt_lookup", None),
    }


def test_standard_is_valid() -> None:
    assert load_plan(SWEEPS / "standard.yaml").method == "optuna"


def test_an_entry_without_a_draft_is_tried_with_each_of_the_pairs() -> None:
    plan = Plan.model_validate({"pair": {"drafts": {"a": "x", "b": "y"}}, "search": [FIXED]})
    assert [c.drafter.draft for c in plan.configurations()] == ["a", "a", "b", "b"]


def test_a_pair_without_drafts_is_swept_with_what_needs_none() -> None:
    plan = Plan.model_validate({"pair": {"drafts": {}}, "search": [FIXED, LOOKUP]})
    assert [c.family for c in plan.configurations()] == ["prompt_lookup"]


def test_options_override_the_file_key_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, prompts={"source": "a.jsonl", "limit": 3}, max_new_tokens=5)
    plan = load_plan(path, prompts={"source": "b.jsonl"}, max_new_tokens=7)
    assert (plan.prompts.source, plan.prompts.limit, plan.max_new_tokens) == ("b.jsonl", 3, 7)


def test_a_grid_larger_than_trials_is_sampled_alike_each_time() -> None:
    many = [{"drafter": {"kind": "prompt_lookup", "max_tokens": list(range(1, 21))}}]
    plan = Plan.model_validate({"search": many, "trials": 5})
    chosen = plan.configurations()
    assert len(chosen) == 5
    assert chosen == plan.configurations()


def test_the_digest_follows_settings_and_prompts() -> None:
    plan = Plan.model_validate({"search": [FIXED]})
    longer = plan.model_copy(update={"max_new_tokens": 65})
    assert len({plan.digest("p"), plan.digest("q"), longer.digest("p")}) == 3
    assert plan.digest("p") == Plan.model_validate({"search": [FIXED]}).digest("p")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"finalist": 3}, "finalist: unknown key"),
        ({"prompts": {"file": "x"}}, "prompts.file: unknown key"),
        ({"method": "random"}, "trials: method random needs a number of trials"),
        ({"max_new_tokens": 0}, "max_new_tokens: Input should be greater than 0 (got 0)"),
        (
            {"search": [{"drafter": {"kind": "draft_model", "draft": "huge"}}]},
            "the pair has no draft 'huge' (it has: medium, small)",
        ),
        (
            {"search": [{**LOOKUP, "sampling": {"temperature": [0.0, 0.7]}}]},
            "a sweep compares configurations of one sampling",
        ),
        (
            {
                "search": [
                    {
                        "drafter": {
                            "kind": "draft_model",
                            "policy": {"kind": "svip", "threshold": -1},
                        }
                    }
                ]
            },
            "search.0: drafter.draft_model.policy.svip.threshold",
        ),
        ({"search": []}, "search: nothing to search"),
        ({"search": "all"}, "search: "),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **content)
    with pytest.raises(UserError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_plan(tmp_path / "none.yaml")
