"""A configuration's id is its identity in sweeps, MLflow and on disk: it never changes."""

import re
from typing import Any

import pytest
import yaml

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling, identity, parse
from specdec_core.config.kinds import DRAFTERS, POLICIES

# As they were written by the versions before: the id, and the drafter. SpecDec++ drafts at least
# two candidates where it may, whether `min_tokens` is 1 or 2.
WRITTEN = """
588cf43aef null
46718f0aa2 {kind: draft_model}
a1ed5f7f46 {kind: draft_model, draft: small, policy: {kind: fixed, max_tokens: 7}}
8f82136cce {kind: draft_model, policy: {kind: heuristic, start: 3, transient: false}}
350c9ff6ea {kind: draft_model, policy: {kind: confidence, threshold: 0.6}}
884e3b70de {kind: draft_model, policy: {kind: svip, threshold: 1.1, max_tokens: 12}}
1ae0acdfc0 {kind: draft_model, policy: {kind: confidence_product}}
f255624e2d {kind: draft_model, policy: {kind: break_even}}
63d47d94b1 {kind: draft_model, policy: {kind: pre_cut, target_cost: 8.5, bins: 4}}
708ce36eb7 {kind: draft_model,
 policy: {kind: specdecpp, head: 'bundled:small-joint', min_tokens: 2}}
708ce36eb7 {kind: draft_model,
 policy: {kind: specdecpp, head: 'bundled:small-joint', min_tokens: 1}}
d1b772e7ab {kind: draft_model,
 policy: {kind: specdecpp, head: 'bundled:small-joint', max_tokens: 1}}
b8020c211c {kind: draft_model, policy: {kind: decision, head: t2, cumulative: true}}
5074478537 {kind: draft_model, policy: {kind: oracle}}
9b2a407040 {kind: tree}
d6e4d24de9 {kind: tree, branching: [2, [3, 1], [2, 0, 0, 1], 1], replacement: true}
ec352b884b {kind: fork, width: 3, policy: {kind: svip}}
21a35d5b94 {kind: target_tree, branching: [1, 2, 2]}
296000a8e7 {kind: target_fork, width: 3, spread: 2, policy: {kind: svip, max_tokens: 5}}
e616cc8716 {kind: dynamic_tree, least: 0.01}
af923875dc {kind: prompt_lookup, max_ngram: 4}
af923875dc {kind: prompt_lookup, max_ngram: 4, occurrence: latest}
b9db37e62a {kind: suffix, tree: true, memory: all}
8b60bdccb1 {kind: token_cache, learn_from: output, from_prompt: true}
5ac31bc352 {kind: cascade, proposer: {kind: suffix}, policy: {kind: heuristic}}
3d3a80ca05 {kind: post_use, at_draft: 0}
b439ec5633 {kind: hybrid, min_match: 3, merge: true, extend: true}
d192731e25 {kind: hybrid, lookup: {kind: token_cache}, otherwise: {kind: pearl, window: 8}}
23b3608fa9 {kind: bandit, arms: [2, {kind: svip}, {kind: suffix},
 {kind: hybrid, otherwise: {kind: tree}}]}
586c633be0 {kind: bandit, rule: exp3, reward: time, memory: request, seed: 3,
 arms: [{kind: bandit, arms: [1, 4]},
 {drafter: {kind: prompt_lookup}, sampling: {temperature: 1.0}}]}
6a85db2e9b {kind: pearl}
3ca1ebc815 {kind: pearl, drafter: {kind: cascade}, window: 6, wait: 0, width: 3}
a6f5414c08 {kind: schedule, ranges: {4: {kind: suffix}, 1: 3, 9: null}}
"""
IDS: list[tuple[str, dict[str, Any] | None]] = [
    (line[:10], yaml.safe_load(line[10:])) for line in re.split(r"\n(?! )", WRITTEN.strip())
]
COUPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "coupling": "gumbel"}


@pytest.mark.parametrize(("known", "drafter"), IDS, ids=[known for known, _ in IDS])
def test_ids_are_those_of_the_versions_before(known, drafter):
    configuration = Configuration.model_validate({"drafter": drafter})
    assert configuration.id == known
    assert Configuration.model_validate_json(configuration.model_dump_json()).id == known


def test_the_sampling_is_part_of_the_id():
    value = {"drafter": IDS[2][1], "sampling": COUPLED}
    assert Configuration.model_validate(value).id == "5744315680"


def test_every_kind_is_among_them():
    found = [Configuration.model_validate({"drafter": drafter}) for _, drafter in IDS]
    assert {part.kind for own in found for part in own.parts} == set(DRAFTERS)
    assert {policy.kind for own in found for _, policy in own.policies} == set(POLICIES)


def test_an_arms_id_depends_on_what_it_says_alone():
    [one, other] = Configuration.model_validate(
        {"drafter": {"kind": "bandit", "arms": [1, 4]}}
    ).drafter.arms
    assert identity(one) == identity(type(one).model_validate(one.model_dump()))
    assert identity(one) != identity(other)


def test_later_ways_to_sample_are_written_only_where_they_are_used():
    assert Sampling().model_dump().keys() == {"temperature", "top_k", "top_p", "coupling"}
    given = {"repetition_penalty": 1.1, "min_p": 0.1, "logit_bias": {"7": -100, "3": 2}}
    sampling = parse(Sampling, given, "test")
    assert sampling.logit_bias == ((3, 2.0), (7, -100.0))
    configuration = Configuration(sampling=sampling)
    assert Configuration.model_validate_json(configuration.model_dump_json()) == configuration
    assert configuration.id != Configuration().id
    assert hash(configuration) != hash(Configuration())


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {5: 101}}, "less than or equal to 100"),
        ({"logit_bias": {5: 1, "5": 2}}, "a token is given twice"),
        ({"presence_penalty": 2.5}, "less than or equal to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": float("nan")}, "min_p"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(given, wrong):
    with pytest.raises(UserError, match=wrong):
        parse(Sampling, given, "test")
