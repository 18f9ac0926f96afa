"""A mistake in a file is named by its path in the file, with what would be right."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, parse

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
def test_a_mistake_in_a_drafter(drafter, message):
    with pytest.raises(UserError) as caught:
        parse(Configuration, {"drafter": drafter}, "here")
    assert str(caught.value).startswith(f"here: {message}")
    assert "\n" not in str(caught.value)


def cached(kind="post_use", **settings):
    return {"kind": kind, **settings}


BEGUN = {"kind": "target_tree"}
JOINED = "target_tree begins with the target's tokens"
AHEAD = {"kind": "pearl"}
WARM, COLD = ({"drafter": {"kind": "suffix"}, "sampling": {"temperature": t}} for t in (0.7, 0))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"kind": "bandit", "arms": [3]}, "at least two arms"),
        ({"kind": "bandit", "arms": [3, 3]}, "at least two arms, each given once"),
        ({"kind": "bandit", "arms": [WARM, COLD]}, "different sampling settings"),
        ({"kind": "bandit", "arms": [BEGUN, 2]}, JOINED),
        ({"kind": "bandit", "arms": [AHEAD, AHEAD | {"window": 3}]}, "pearl"),
        ({"kind": "schedule", "ranges": {2: 3}}, "no drafter for 1 request"),
        ({"kind": "schedule", "ranges": {1: None}}, "drafts nothing at any number"),
        ({"kind": "schedule", "ranges": {0: 3, 1: 2}}, "greater than or equal to 1"),
        ({"kind": "schedule", "ranges": {1: AHEAD, 3: AHEAD | {"window": 3}}}, "more than one"),
        ({"kind": "schedule", "ranges": {1: WARM, 3: 2, 5: COLD}}, "different sampling"),
        ({"kind": "schedule", "ranges": {1: BEGUN, 4: None}}, JOINED),
        ({"kind": "hybrid", "otherwise": BEGUN}, JOINED),
        (
            {"kind": "hybrid", "merge": True, "lookup": {"kind": "suffix", "max_tokens": 20}}
            | {"otherwise": {"kind": "dynamic_tree", "keep": 128}},
            "a tree of 148 nodes, at most 128",
        ),
        ({"kind": "dynamic_tree", "expand": 8, "policy": SVIP}, "expands 152 nodes"),
        ({"kind": "dynamic_tree", "keep": 129}, "128"),
        (cached(at_target=10, anchors=3), "post_use: a tree of 162 nodes, at most 128"),
        (
            cached(at_draft=16, cache={"phrase_length": 9}),
            "post_use: tries 144 tokens at the draft",
        ),
        (cached("token_cache", phrases=64), "token_cache: a tree of 320 nodes"),
        (AHEAD | {"drafter": {"kind": "tree"}}, "'tree' cannot be used here; there are"),
        (AHEAD | {"window": 3, "wait": 4}, "pearl"),
    ],
)
def test_settings_that_make_no_sense_together(drafter, message):
    with pytest.raises(UserError) as caught:
        parse(Configuration, {"drafter": drafter}, "here")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_a_configuration_itself():
    for value in ({"sampling": {"temprature": 1}}, {"drafter": None, "colour": 1}):
        with pytest.raises(UserError, match=r"here: (sampling\.temprature|colour): unknown key; "):
            parse(Configuration, value, "here")
