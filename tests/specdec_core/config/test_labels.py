"""What configurations are called, and the sentences beside."""

import pytest
from mlflow.utils.validation import _validate_model_name

from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec, Sampling, distinct_labels
from specdec_core.config.kinds import DRAFTERS, POLICIES, KindSettings
from tests.specdec_core.kinds import drafter, policy

KINDS = [*((drafter, kind) for kind in DRAFTERS), *((policy, kind) for kind in POLICIES)]


def chain(draft="small", **own):
    return {"kind": "draft_model", "draft": draft, "policy": own}


CASCADE = chain(kind="confidence_product", threshold=0.4) | {"kind": "cascade"}
CASCADE |= {"proposer": {"kind": "suffix", "max_tokens": 6}}
HYBRID = {"kind": "hybrid", "otherwise": CASCADE}
PEARL = {"kind": "pearl", "drafter": chain(kind="fixed", max_tokens=12)}
BESIDE = {"kind": "hybrid", "merge": True, "extend": True, "otherwise": PEARL}
TREE = {"kind": "tree", "draft": "small"}
BANDIT = {"kind": "bandit", "arms": [2, {"kind": "suffix"}]}


def configuration(drafter, **sampling):
    return Configuration.model_validate({"drafter": drafter, "sampling": sampling})


@pytest.mark.parametrize(
    ("drafter", "label"),
    [
        (None, "autoregressive"),
        (chain(kind="fixed", max_tokens=4), "small, K=4"),
        (chain(None, kind="fixed", max_tokens=1), "draft, K=1"),
        (chain(kind="svip", threshold=0.9, max_tokens=8), "small, entropy 0.9 up to 8"),
        (chain("medium", kind="specdecpp", head="heads/own"), "medium, SpecDec++ 0.7"),
        ({"kind": "suffix"}, "suffix"),
        ({"kind": "suffix", "max_tokens": 20, "memory": "all"}, "shared suffix 20"),
        ({"kind": "prompt_lookup"}, "prompt lookup 3/10"),
        (CASCADE, "cascade small + suffix, product 0.4"),
        (HYBRID, "suffix else cascade small"),
        (BESIDE, "suffix + PEARL small, extended"),
        (TREE | {"branching": [3, 1, 1, 1]}, "tree 3-1-1-1, small"),
        (TREE | {"branching": [[3], [2, 1, 0]]}, "tree of 6, small"),
        (TREE | {"kind": "target_tree", "branching": [2, 2, 1]}, "target tree 2-2-1, small, lossy"),
        (BANDIT | {"reward": "time"}, "UCB of 2 arms, by time"),
    ],
)
def test_labels_are_short(drafter, label):
    assert configuration(drafter).label == label


def test_a_sentence_describes_the_parts_and_their_numbers():
    hybrid = configuration(HYBRID | {"min_match": 3, "merge": True})
    lookup, otherwise = hybrid.drafter.parts
    assert hybrid.sentence.endswith(
        f"min match 3, merge yes. {lookup.sentence} {otherwise.sentence}"
    )
    assert otherwise.sentence.endswith(
        f"draft small. {otherwise.policy.sentence} {otherwise.proposer.sentence}"
    )
    assert otherwise.policy.sentence == (
        "Stop when the product of the round's draft probabilities q(y) falls below threshold:"
        " threshold 0.4, max tokens 20."
    )
    bandit = configuration(BANDIT)
    assert "arms draft, K=2; suffix" in bandit.sentence
    lossy = configuration({"kind": "target_tree", "branching": [2, 2, 1]})
    assert lossy.sentence.endswith("The output does not keep the target's distribution.")


def test_sampling_is_said_behind():
    sampled = configuration(None, temperature=0.8, top_k=40, top_p=0.9, coupling="gumbel")
    assert sampled.label == "autoregressive (T=0.8, top-k=40, top-p=0.9, coupled)"
    assert sampled.sentence == (
        "The target model decodes alone. Sampled at temperature 0.8, from the 40 likeliest tokens,"
        " top-p 0.9, draft and target with the same noise."
    )


@pytest.mark.parametrize(("make", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_labels_are_plain_and_sentences_end(make, kind):
    own: KindSettings = make(kind)
    assert own.label.isascii()
    assert len(own.label) <= 36
    assert own.sentence[0].isupper()
    assert own.sentence.endswith(".")
    assert ".." not in own.sentence


NUMBERS = [
    (make, kind, name)
    for make, kind in KINDS
    for name, field in type(make(kind)).model_fields.items()
    if isinstance(getattr(make(kind), name), int | float)
]
# Numbers that only matter with a width above 1.
BESIDE = {("target_fork", "spread"): {"width": 4}, ("pearl", "least"): {"width": 4}}


@pytest.mark.parametrize(
    ("make", "kind", "name"), NUMBERS, ids=[f"{kind}-{name}" for _, kind, name in NUMBERS]
)
def test_a_sentence_says_every_number_that_is_not_default(make, kind, name):
    own: KindSettings = make(kind, **BESIDE.get((kind, name), {}))
    value = getattr(own, name)
    if isinstance(value, bool):
        changed = not value
    else:
        changed = value + 1 if isinstance(value, int) else 0.9 * value or 0.05
    other = type(own).model_validate({**own.model_dump(), name: changed})
    assert other.sentence != own.sentence


def test_those_of_the_same_label_get_the_beginning_of_their_ids():
    hybrids = [configuration(HYBRID | {"min_match": n}) for n in range(2, 9)]
    labels = distinct_labels([AUTOREGRESSIVE, *hybrids, hybrids[0]])
    assert list(labels) == [c.id for c in (AUTOREGRESSIVE, *hybrids)]
    assert labels[AUTOREGRESSIVE.id] == "autoregressive"
    assert labels[hybrids[0].id] == f"suffix else cascade small ({hybrids[0].id[:4]})"
    assert len(set(labels.values())) == len(labels)


def test_those_that_differ_in_their_heads_are_told_by_these():
    policies = [{"kind": "decision", "head": f"heads/llm/small-{kind}"} for kind in ("t1", "t2")]
    chains = [configuration({"kind": "draft_model", "policy": policy}) for policy in policies]
    for shown in (chains, [own.drafter for own in chains]):
        labels = distinct_labels(shown)
        names = [label.rpartition(" (")[2] for label in labels.values()]
        assert names == ["small-t1)", "small-t2)"]


def test_ids_that_begin_alike_are_shown_longer():
    many = [configuration(HYBRID | {"min_match": n}) for n in range(2, 900)]
    labels = distinct_labels(many)
    assert len({own.id[:4] for own in many}) < len(many)
    assert len(set(labels.values())) == len(labels)


def test_the_sampling_is_in_the_label_where_it_distinguishes():
    warm = Configuration(sampling=Sampling(temperature=0.8))
    assert distinct_labels([warm]) == {warm.id: "autoregressive"}
    assert distinct_labels([warm, AUTOREGRESSIVE]) == {
        warm.id: "autoregressive (T=0.8)",
        AUTOREGRESSIVE.id: "autoregressive",
    }


@pytest.mark.parametrize("place", [".", "..", "/models/anne's", "package:some", "org/model"])
def test_a_pair_has_a_name_that_mlflow_registers(tmp_path, monkeypatch, place):
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "sub")
    name = PairSpec(target=place).name
    _validate_model_name(name)
    assert "'" not in name
    _validate_model_name(PairSpec(target=place, drafts={"a": "/models/a"}).name)
