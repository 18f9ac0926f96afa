"""A mistake in a file is named by its path in the file, with what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, parse
from specdec_core.search.plan import Plan

DRAFT = {"kind": "draft_model"}
SVIP = {"kind": "svip"}


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            {**DRAFT, "policy": {**SVIP, "treshold": 1}},
            "drafter.policy.treshold: unknown key; did you mean threshold?",
        ),
        (
            {"kind": "hybrid", "lookup": {"kind": "suffix", "colour": 1}},
            "drafter.lookup.colour: unknown key; there are kind, min_match, max_tokens, ",
        ),
        (
            {"kind": "schedule", "ranges": {1: None, 4: {"kind": "suffix", "max_token": 1}}},
            "drafter.ranges.4.max_token: unknown key; did you mean max_tokens?",
        ),
        (
            {"kind": "bandit", "arms": [2, {"kind": "suffix", "max_token": 1}]},
            "drafter.arms.1.max_token: unknown key; did you mean max_tokens?",
        ),
        (
            SVIP,
            "drafter: no drafter 'svip', it is a length policy: put it as policy: {kind: svip} into"
            " a drafter; there are draft_model, tree, ",
        ),
        (
            {**DRAFT, "policy": {"kind": "suffix"}},
            "drafter.policy: no length policy 'suffix', it is a drafter; there are fixed, ",
        ),
        ({"kind": "sufix"}, "drafter: no drafter 'sufix'; there are draft_model, tree, "),
        ({"kind": ["suffix"]}, "drafter: no drafter ['suffix']; there are draft_model, "),
        ({**DRAFT, "policy": "svip"}, "drafter.policy: expected {kind: …}; there are fixed, "),
        ({**DRAFT, "policy": {}}, "drafter.policy: its kind is missing; there are fixed, "),
        (
            {"kind": "hybrid", "lookup": {"kind": "tree"}},
            "drafter.lookup: drafter 'tree' cannot be used here; there are prompt_lookup, suffix, ",
        ),
        # The members of a union are no keys of the file.
        ({"kind": "tree", "branching": [2, "x"]}, "drafter.branching.1: Input should be a valid"),
    ],
)
def test_a_mistake_in_a_drafter(drafter: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(Configuration, {"drafter": drafter}, "here")
    assert str(caught.value).startswith(f"here: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"sampling": {"temprature": 1}},
            "sampling.temprature: unknown key; did you mean temperature?",
        ),
        ({"pair": {"runner": {"compiles": 1}}}, "pair.runner.compiles: unknown key; did you mean"),
        ({"race": {"colour": 1}}, "race.colour: unknown key; there are within, seconds, further, "),
        ({"prompts": "p.jsonl"}, "prompts: expected {source: …} (got 'p.jsonl')"),
        ({"max_new_tokens": {}}, "max_new_tokens: Input should be a valid integer"),
    ],
)
def test_a_mistake_in_a_sweep(value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(Plan, {"search": [], **value}, "here")
    assert str(caught.value).startswith(f"here: {message}")


def test_a_key_of_a_configuration_itself() -> None:
    for value in ({"sampling": {"temprature": 1}}, {"drafter": None, "colour": 1}):
        with pytest.raises(UserError, match=r"here: (sampling\.temprature|colour): unknown key; "):
            parse(Configuration, value, "here")
