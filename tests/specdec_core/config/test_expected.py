"""A mistake in a file is named by its path in the file, with what would be right."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, parse

DRAFT, HYBRID, BANDIT, SCHEDULE, SVIP, SUFFIX = (
    {"kind": kind} for kind in ("draft_model", "hybrid", "bandit", "schedule", "svip", "suffix")
)
WRONG = SUFFIX | {"max_token": 1}
UNKNOWN = "unknown key; did you mean"


def refusal(drafter):
    """The error message for a drafter that is none, one line."""
    with pytest.raises(UserError, match=r"^here: .*\Z") as caught:  # one line
        parse(Configuration, {"drafter": drafter}, "here")
    return str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (DRAFT | {"policy": SVIP | {"treshold": 1}}, f".policy.treshold: {UNKNOWN} threshold?"),
        (
            HYBRID | {"lookup": SUFFIX | {"colour": 1}},
            ".lookup.colour: unknown key; there are kind, min_match, max_tokens, ",
        ),
        (SCHEDULE | {"ranges": {1: None, 4: WRONG}}, f".ranges.4.max_token: {UNKNOWN} max_tokens?"),
        (BANDIT | {"arms": [2, WRONG]}, f".arms.1.max_token: {UNKNOWN} max_tokens?"),
        (
            SVIP,
            ": no drafter 'svip', it is a length policy: put it as policy: {kind: svip} into"
            " a drafter; there are draft_model, tree, ",
        ),
        (
            DRAFT | {"policy": SUFFIX},
            ".policy: no length policy 'suffix', it is a drafter; there are fixed, ",
        ),
        ({"kind": "sufix"}, ": no drafter 'sufix'; there are draft_model, tree, "),
        ({"kind": ["suffix"]}, ": no drafter ['suffix']; there are draft_model, "),
        (DRAFT | {"policy": "svip"}, ".policy: expected {kind: …}; there are fixed, "),
        (DRAFT | {"policy": {}}, ".policy: its kind is missing; there are fixed, "),
        (
            HYBRID | {"lookup": {"kind": "tree"}},
            ".lookup: drafter 'tree' cannot be used here; there are prompt_lookup, suffix, ",
        ),
        # The members of a union are no keys of the file.
        ({"kind": "tree", "branching": [2, "x"]}, ".branching.1: Input should be a valid"),
    ],
)
def test_a_mistake_in_a_drafter(drafter, message):
    assert refusal(drafter).startswith(f"here: drafter{message}")


CACHED, BEGUN, AHEAD = ({"kind": kind} for kind in ("post_use", "target_tree", "pearl"))
JOINED = "target_tree begins with the target's tokens"
WARM, COLD = ({"drafter": {"kind": "suffix"}, "sampling": {"temperature": t}} for t in (0.7, 0))
MISSPELT = {"drafter": SUFFIX, "samplng": {"temperature": 1}}


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (BANDIT | {"arms": [3]}, "at least two arms"),
        (BANDIT | {"arms": [3, 3]}, "at least two arms, each given once"),
        (BANDIT | {"arms": [WARM, COLD]}, "different sampling settings"),
        (HYBRID | {"otherwise": BANDIT | {"arms": [WARM, COLD]}}, "different sampling settings"),
        (BANDIT | {"arms": [2, MISSPELT]}, "arms: samplng: unknown key of an arm; there are "),
        (SCHEDULE | {"ranges": {1: MISSPELT, 3: 2}}, "ranges: samplng: unknown key of an arm"),
        (BANDIT | {"arms": [BEGUN, 2]}, JOINED),
        (BANDIT | {"arms": [AHEAD, AHEAD | {"window": 3}]}, "pearl"),
        (SCHEDULE | {"ranges": {2: 3}}, "no drafter for 1 request"),
        (SCHEDULE | {"ranges": {1: None}}, "drafts nothing at any number"),
        (SCHEDULE | {"ranges": {0: 3, 1: 2}}, "greater than or equal to 1"),
        (SCHEDULE | {"ranges": {1: AHEAD, 3: AHEAD | {"window": 3}}}, "more than one"),
        (SCHEDULE | {"ranges": {1: WARM, 3: 2, 5: COLD}}, "different sampling"),
        (SCHEDULE | {"ranges": {1: BEGUN, 4: None}}, JOINED),
        (HYBRID | {"otherwise": BEGUN}, JOINED),
        (
            HYBRID
            | {"merge": True, "lookup": SUFFIX | {"max_tokens": 20}}
            | {"otherwise": {"kind": "dynamic_tree", "keep": 128}},
            "a tree of 148 nodes, at most 128",
        ),
        ({"kind": "dynamic_tree", "expand": 8, "policy": SVIP}, "expands 152 nodes"),
        ({"kind": "dynamic_tree", "keep": 129}, "128"),
        (CACHED | {"at_target": 10, "anchors": 3}, "post_use: a tree of 162 nodes, at most 128"),
        (CACHED | {"at_draft": 16, "cache": {"phrase_length": 9}}, "post_use: tries 144 tokens at"),
        ({"kind": "token_cache", "phrases": 64}, "token_cache: a tree of 320 nodes"),
        (AHEAD | {"drafter": {"kind": "tree"}}, "'tree' cannot be used here; there are"),
        (AHEAD | {"window": 3, "wait": 4}, "pearl"),
    ],
)
def test_settings_that_make_no_sense_together(drafter, message):
    assert message in refusal(drafter)


def test_the_sampling_of_an_arm_counts_wherever_the_arm_is():
    bandit = BANDIT | {"arms": [3, WARM]}
    for drafter in (bandit, HYBRID | {"otherwise": bandit}, SCHEDULE | {"ranges": {1: bandit}}):
        found = parse(Configuration, {"drafter": drafter}, "here")
        assert found.sampling.temperature == 0.7


def test_a_draft_that_the_pair_lacks():
    alone, first = (parse(Configuration, {"drafter": own}, "here") for own in (SUFFIX, DRAFT))
    alone.check_drafts((), "here")
    first.check_drafts(["small"], "here")
    with pytest.raises(UserError, match=r"^here: it needs a draft model, and the pair has none: "):
        first.check_drafts((), "here")
    for names, known in ((["small"], "small"), ((), "none")):
        with pytest.raises(UserError, match=rf"no draft 'big' \(it has: {known}\)"):
            first.with_draft("big").check_drafts(names, "here")


def test_a_key_of_a_configuration_itself():
    for value in ({"sampling": {"temprature": 1}}, {"drafter": None, "colour": 1}):
        with pytest.raises(UserError, match=r"here: (sampling\.temprature|colour): unknown key; "):
            parse(Configuration, value, "here")
