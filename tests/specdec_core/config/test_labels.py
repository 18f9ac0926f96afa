"""What configurations are called, and the sentences beside."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling, distinct_labels
from specdec_core.config.kinds import DRAFTERS, POLICIES, KindSettings
from tests.specdec_core.kinds import drafter, policy

KINDS = [*((drafter, kind) for kind in DRAFTERS), *((policy, kind) for kind in POLICIES)]


def chain(draft: str | None = "small", **own: Any) -> dict[str, Any]:
    return {"kind": "draft_model", "draft": draft, "policy": own}


PRODUCT = {"kind": "confidence_product", "threshold": 0.4}
CASCADE = {
    "kind": "cascade",
    "draft": "small",
    "policy": PRODUCT,
    "proposer": {"kind": "suffix", "max_tokens": 6},
}


def configuration(drafter: dict[str, Any] | None, **sampling: Any) -> Configuration:
    return Configuration.model_validate({"drafter": drafter, "sampling": sampling})


@pytest.mark.parametrize(
    ("drafter", "label", "sentence"),
    [
        (None, "autoregressive", "The target model decodes alone."),
        (
            chain(kind="fixed", max_tokens=4),
            "small, K=4",
            "The small draft model drafts 4 tokens a round.",
        ),
        (
            chain(None, kind="fixed", max_tokens=1),
            "draft, K=1",
            "The draft model drafts 1 token a round.",
        ),
        (
            chain(kind="svip", threshold=0.9, max_tokens=8),
            "small, entropy 0.9 up to 8",
            "The small draft model drafts until the square root of its entropy exceeds 0.9, up to 8"
            " tokens.",
        ),
        (
            chain("medium", kind="specdecpp", head="heads/own", threshold=0.5),
            "medium, SpecDec++ 0.5",
            "The medium draft model drafts until the head own sees a chance of more than 0.5 that a"
            " token of the round is rejected.",
        ),
        (
            {"kind": "suffix"},
            "suffix",
            "Copies what followed the longest suffix seen before, up to 10 tokens.",
        ),
        (
            {"kind": "suffix", "max_tokens": 20, "memory": "all", "min_match": 2},
            "shared suffix 20",
            "Copies what followed the longest suffix seen in this request or an earlier one, at"
            " least 2 tokens long, up to 20 tokens.",
        ),
        (
            {"kind": "prompt_lookup"},
            "prompt lookup 3/10",
            "Copies what followed the last tokens earlier in the text, 3 tokens compared at most,"
            " up to 10 tokens.",
        ),
        (
            CASCADE,
            "cascade small + suffix, product 0.4",
            "The small draft model drafts until the product of its probabilities falls below 0.4,"
            " sped up by suffix guesses of up to 6 tokens.",
        ),
        (
            {"kind": "hybrid", "min_match": 3, "otherwise": CASCADE},
            "suffix else cascade small",
            "Copies what followed the longest suffix seen before, at least 3 tokens long, up to 10"
            " tokens. Otherwise the small draft model drafts until the product of its probabilities"
            " falls below 0.4, sped up by suffix guesses of up to 6 tokens.",
        ),
        (
            {
                "kind": "hybrid",
                "merge": True,
                "extend": True,
                "otherwise": {"kind": "pearl", "drafter": chain(kind="fixed", max_tokens=12)},
            },
            "suffix + PEARL small, extended",
            "Copies what followed the longest suffix seen before, at least 2 tokens long, up to 10"
            " tokens. In the same tree the small draft model drafts 12 tokens a round. Meanwhile"
            " the target verifies, on another device, up to 12 tokens at once (PEARL). Its draft"
            " goes on with what is looked up after it.",
        ),
        (
            {"kind": "tree", "draft": "small", "branching": [3, 1, 1, 1]},
            "tree 3-1-1-1, small",
            "The small draft model grows a tree with 3, 1, 1, 1 children a node, level by level.",
        ),
        (
            {"kind": "tree", "draft": "small", "branching": [[3], [2, 1, 0]]},
            "tree of 6, small",
            "The small draft model grows a tree with 6 nodes, 3, 2+1+0 children level by level.",
        ),
        (
            {"kind": "target_tree", "draft": "small", "branching": [2, 2, 1]},
            "target tree 2-2-1, small, lossy",
            "The target begins a tree with 2 tokens of its own, and the small draft model continues"
            " it with 2, 1 children a node, level by level. The output does not keep the target's"
            " distribution.",
        ),
        (
            {"kind": "bandit", "reward": "time", "arms": [2, {"kind": "suffix"}]},
            "UCB of 2 arms, by time",
            "Learns who drafts best, by tokens a millisecond (UCBSpec): draft, K=2; suffix.",
        ),
    ],
)
def test_a_label_is_short_and_the_sentence_says_the_rest(
    drafter: dict[str, Any] | None, label: str, sentence: str
) -> None:
    own = configuration(drafter)
    assert (own.label, own.sentence) == (label, sentence)


def test_sampling_is_said_behind() -> None:
    sampled = configuration(None, temperature=0.8, top_k=40, top_p=0.9, coupling="gumbel")
    assert sampled.label == "autoregressive (T=0.8, top-k=40, top-p=0.9, coupled)"
    assert sampled.sentence == (
        "The target model decodes alone. Sampled at temperature 0.8, from the 40 likeliest tokens,"
        " top-p 0.9, draft and target with the same noise."
    )


@pytest.mark.parametrize(("make", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_labels_are_plain_and_sentences_end(make: Any, kind: str) -> None:
    own: KindSettings = make(kind)
    assert own.label.isascii()
    assert len(own.label) <= 36
    assert own.sentence[0].isupper()
    assert own.sentence.endswith(".")
    assert ".." not in own.sentence
    assert make is drafter or own.sentence.startswith("Drafts ")


NUMBERS = [
    (make, kind, name)
    for make, kind in KINDS
    for name, field in type(make(kind)).model_fields.items()
    if isinstance(getattr(make(kind), name), int | float)
]
# Bounds that only exist beside others: what a width of 1 is worth looking at.
BESIDE = {("target_fork", "spread"): {"width": 4}, ("pearl", "least"): {"width": 4}}


@pytest.mark.parametrize(
    ("make", "kind", "name"), NUMBERS, ids=[f"{kind}-{name}" for _, kind, name in NUMBERS]
)
def test_a_sentence_says_every_number_that_is_not_default(make: Any, kind: str, name: str) -> None:
    own: KindSettings = make(kind, **BESIDE.get((kind, name), {}))
    value = getattr(own, name)
    if isinstance(value, bool):
        changed = not value
    else:
        changed = value + 1 if isinstance(value, int) else 0.9 * value or 0.05
    other = type(own).model_validate({**own.model_dump(), name: changed})
    assert other.sentence != own.sentence


def test_those_of_the_same_label_get_the_beginning_of_their_ids() -> None:
    hybrids = [
        configuration({"kind": "hybrid", "min_match": n, "otherwise": CASCADE}) for n in range(2, 9)
    ]
    labels = distinct_labels([AUTOREGRESSIVE, *hybrids, hybrids[0]])
    assert list(labels) == [c.id for c in (AUTOREGRESSIVE, *hybrids)]
    assert labels[AUTOREGRESSIVE.id] == "autoregressive"
    assert labels[hybrids[0].id] == f"suffix else cascade small ({hybrids[0].id[:4]})"
    assert len(set(labels.values())) == len(labels)


def test_those_that_differ_in_their_heads_are_told_by_these() -> None:
    policies = [{"kind": "decision", "head": f"heads/llm/small-{kind}"} for kind in ("t1", "t2")]
    chains = [configuration({"kind": "draft_model", "policy": policy}) for policy in policies]
    for shown in (chains, [own.drafter for own in chains]):
        labels = distinct_labels(shown)
        names = [label.rpartition(" (")[2] for label in labels.values()]
        assert names == ["small-t1)", "small-t2)"]


def test_ids_that_begin_alike_are_shown_longer() -> None:
    many = [
        configuration({"kind": "hybrid", "min_match": n, "otherwise": CASCADE})
        for n in range(2, 900)
    ]
    labels = distinct_labels(many)
    assert len({own.id[:4] for own in many}) < len(many)
    assert len(set(labels.values())) == len(labels)


def test_the_sampling_is_in_the_label_where_it_distinguishes() -> None:
    warm = Configuration(sampling=Sampling(temperature=0.8))
    assert distinct_labels([warm]) == {warm.id: "autoregressive"}
    assert distinct_labels([warm, AUTOREGRESSIVE]) == {
        warm.id: "autoregressive (T=0.8)",
        AUTOREGRESSIVE.id: "autoregressive",
    }
