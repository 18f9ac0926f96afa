"""No lossless drafter changes what is written: a fixed output stays the target's own, and samples
have the target's joint distribution."""

from typing import Any

import pytest

from specdec_core.config import Sampling
from tests.conftest import save_random_head
from tests.specdec_core.drafting.proofs import assert_the_targets_own
from tests.specdec_core.fits import fit
from tests.specdec_core.kinds import chain, configured

COUPLED = Sampling(temperature=0.3, coupling="gumbel")  # so cold that lookups find something
SUFFIX = {"kind": "suffix"}
CACHE = {"kind": "token_cache"}
CHAIN = chain(max_tokens=4)
DYNAMIC = {"kind": "dynamic_tree", "expand": 3, "children": 3, "keep": 10}
MIXED = [
    CHAIN,
    chain("pre_cut", max_tokens=5),
    {"kind": "tree", "branching": [3, 2]},
    {"kind": "post_use", "policy": {"kind": "fixed", "max_tokens": 4}},
    {"kind": "prompt_lookup"},
    SUFFIX,
]


def fork(kind="fork", /, **policy):
    return {"kind": kind, "policy": policy}


DRAFTERS: dict[str, dict[str, Any]] = {
    "tree": {"kind": "tree"},
    "uneven tree": {"kind": "tree", "branching": [3, [2, 0, 1], [1, 0, 2]]},
    "replaced": {"kind": "tree", "branching": [2, 2, 1], "replacement": True},
    "fork": fork(kind="fixed", max_tokens=5),
    "fork that stops": fork(kind="confidence", threshold=0.08, max_tokens=8),
    "fork that learns": fork(kind="pre_cut", target_cost=5, max_tokens=8),
    "fork by a head": fork(kind="specdecpp", head="random", threshold=0.6, max_tokens=8),
    "dynamic tree": DYNAMIC,
    "dynamic tree that stops": DYNAMIC | fork("dynamic_tree", kind="svip", threshold=2.25),
    "dynamic tree by a head": DYNAMIC
    | fork("dynamic_tree", kind="specdecpp", head="random", threshold=0.6, max_tokens=6),
    "target tree": {"kind": "target_tree", "branching": [1, 3, 2, 1]},
    "target fork": {"width": 1, "spread": 3} | fork("target_fork", kind="pre_cut", target_cost=2),
    "prompt lookup": {"kind": "prompt_lookup", "max_tokens": 4, "occurrence": "earliest"},
    "suffix": SUFFIX,
    "shared suffix tree": {"kind": "suffix", "tree": True, "memory": "all"},
    "token cache": CACHE,
    "cache of outputs": CACHE | {"learn_from": "output", "phrases": 2, "phrase_length": 3},
    "shared cache": CACHE | {"memory": "all", "pool": 20, "per_key": 2},
    "cascade": {"kind": "cascade", "proposer": {"kind": "prompt_lookup", "max_tokens": 4}},
    "cascade of a cache": {"kind": "cascade", "proposer": CACHE | {"phrases": 3}},
    "post-use": {"kind": "post_use"},
    "reuse at the draft": {"kind": "post_use", "at_target": 0},
    "reuse at the target": {"kind": "post_use", "at_draft": 0, "anchors": 2},
    "post-use by its costs": {"kind": "post_use", "cache": CACHE | {"memory": "all"}}
    | fork("post_use", kind="pre_cut", target_cost=5),
    "post-use that stops": {"anchors": 5} | fork("post_use", kind="svip", threshold=2.3),
    "hybrid": {"kind": "hybrid", "otherwise": CHAIN},
    "merged": {"kind": "hybrid", "otherwise": CHAIN, "merge": True},
    "extended": {"kind": "hybrid", "otherwise": CHAIN, "min_match": 4, "extend": True},
    "extended tree": {"kind": "hybrid", "otherwise": DYNAMIC, "merge": True, "extend": True},
    "hybrid of a cache": {"kind": "hybrid", "lookup": CACHE, "min_match": 1, "otherwise": CHAIN},
    "hybrid in a hybrid": {
        "kind": "hybrid",
        "min_match": 3,
        "otherwise": {"kind": "hybrid", "otherwise": CACHE, "merge": True},
    },
    "ucb": {"kind": "bandit", "arms": MIXED},
    "exp3": {"kind": "bandit", "rule": "exp3", "memory": "request", "arms": MIXED},
    "thompson": {"kind": "bandit", "rule": "thompson", "reward": "time", "arms": MIXED},
    "bandit of bandits": {
        "kind": "bandit",
        "arms": [{"kind": "bandit", "arms": [1, CHAIN]}, {"kind": "hybrid", "otherwise": CHAIN}],
    },
}
# Drafters with candidates that depend on the shared noise, and lookups, which do not.
ALSO_COUPLED = ["replaced", "fork that stops", "dynamic tree", "shared suffix tree", "token cache"]
ALSO_COUPLED += ["cascade of a cache", "post-use", "extended", "exp3"]


@pytest.fixture
def head(tiny_pair, bare_home):
    """A workspace with an acceptance head of random weights."""
    save_random_head(tiny_pair, "specdecpp", bare_home / "heads" / "random")


@pytest.mark.usefixtures("head")
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_the_targets_own(tiny_pair, name):
    assert_the_targets_own(tiny_pair, DRAFTERS[name])


@pytest.mark.parametrize("name", ALSO_COUPLED)
def test_coupled_output_is_the_targets_own(tiny_pair, name):
    assert_the_targets_own(tiny_pair, DRAFTERS[name], COUPLED)


def toy(drafter, draft, **policy):
    return {**drafter, "draft": draft, **({"policy": policy} if policy else {})}


SMALL = {"kind": "dynamic_tree", "expand": 2, "children": 2, "keep": 5}
SHORT = {"kind": "token_cache", "phrases": 3, "phrase_length": 2, "memory": "all"}
POST_USE = {"kind": "post_use"} | {"cache": CACHE | {"phrase_length": 2, "memory": "all"}}
NEAR_CHAIN = toy(chain(max_tokens=1), "near")
FORK, CASCADE = {"kind": "target_fork", "width": 1, "spread": 2}, {"kind": "cascade"}
PAIRS = {"kind": "tree", "branching": [2, 2]}
HYBRID = {"kind": "hybrid", "lookup": SUFFIX, "min_match": 1}
EXP3 = {"kind": "bandit", "rule": "exp3", "memory": "request"}
STOPS = {"kind": "svip", "threshold": 1.2, "max_tokens": 3}
PLAIN, TOP_K = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3)
TOP_P = Sampling(temperature=1.3, top_p=0.8)
SAMPLED: dict[str, tuple[dict[str, Any], Sampling]] = {
    "dynamic tree": (toy(SMALL, "near", kind="fixed", max_tokens=3), TOP_K),
    "dynamic tree that stops": (toy(SMALL, "far", kind="svip", threshold=1.1, max_tokens=3), PLAIN),
    "pruned": (toy(SMALL | {"least": 0.1}, "near", kind="svip", max_tokens=3), TOP_P),
    "target tree": ({"kind": "target_tree", "draft": "far", "branching": [1, 2, 2]}, PLAIN),
    "target fork": (toy(FORK, "near", kind="confidence", threshold=0.3, max_tokens=3), TOP_K),
    "prompt lookup": ({"kind": "prompt_lookup", "occurrence": "earliest"}, PLAIN),
    "shared suffixes": ({"kind": "suffix", "per_match": 0, "memory": "all"}, PLAIN),
    "suffix tree": ({"kind": "suffix", "per_match": 0, "tree": True}, TOP_P),
    "token cache": (SHORT, TOP_K),
    "cascade": (toy(CASCADE | {"proposer": SHORT}, "near", kind="fixed", max_tokens=3), PLAIN),
    "cascade that stops": (toy(CASCADE, "far", **STOPS), TOP_P),
    "post-use": (toy(POST_USE | {"anchors": 2}, "near", kind="fixed", max_tokens=2), PLAIN),
    "post-use that stops": (toy(POST_USE, "far", **STOPS), TOP_P),
    "hybrid": (HYBRID | {"otherwise": NEAR_CHAIN}, PLAIN),
    "merged": (HYBRID | {"merge": True, "extend": True, "otherwise": toy(SMALL, "far")}, TOP_P),
    "bandit": (EXP3 | {"arms": [NEAR_CHAIN, toy(PAIRS, "far"), SUFFIX]}, PLAIN),
}


# Cells that add a stop or a wider memory to the code of another one.
LONG = {"dynamic tree that stops", "cascade that stops", "target fork", "shared suffixes"}
LONG |= {"post-use that stops"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in SAMPLED],
)
def test_samples_have_the_targets_joint_distribution(name):
    assert fit(*SAMPLED[name]) > 1e-3


@pytest.mark.parametrize(
    "drafter",
    [
        {"kind": "target_tree", "draft": "far", "branching": [2, 2, 2]},
        pytest.param(
            {"kind": "target_fork", "draft": "far", "width": 2, "spread": 2}, marks=pytest.mark.long
        ),
    ],
    ids=["target tree", "target fork"],
)
def test_samples_of_lossy_drafters_do_not(drafter):
    """Two tokens of the target begin a tree, and the tokens after them decide between the two."""
    assert not configured(drafter).lossless
    assert fit(drafter, PLAIN) < 1e-9
