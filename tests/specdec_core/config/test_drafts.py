"""Which draft models a configuration runs."""

from __future__ import annotations

from specdec_core.config import Configuration, parse


def test_whoever_names_no_draft_gets_one_wherever_it_stands() -> None:
    chain = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 2}}
    ranges = {1: {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": chain}, 9: None}
    bandit = {"kind": "bandit", "rule": "ucb", "arms": [chain, {**chain, "draft": "large"}]}
    for drafter in ({"kind": "schedule", "ranges": ranges}, bandit):
        configuration = parse(Configuration, {"drafter": drafter}, "drafter")
        named = configuration.with_draft("small")
        assert None in configuration.drafts
        assert set(named.drafts) == {draft or "small" for draft in configuration.drafts}
        assert named.with_draft("other") == named
