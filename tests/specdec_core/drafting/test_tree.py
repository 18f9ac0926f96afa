"""Trees and forks of candidates, and the output that stays the target's."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.config import Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.dynamic_tree.drafter import rerank
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.policies.confidence import SvipSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.tree.settings import ForkSettings, TreeSettings
from specdec_core.engine import Engine
from specdec_core.models.eager import EagerRunner
from specdec_core.tokens.coupling import SharedNoise
from specdec_core.tokens.sampling import warp
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT
from specdec_core.tokens.topology import static_tree
from tests.conftest import save_random_head
from tests.specdec_core.drafting.proofs import COUNTING, paths, proposals, proposed, requests
from tests.specdec_core.kinds import configured, policy

SHAPES = {
    "4x2x2x1": TreeSettings(),
    "1x3": TreeSettings(branching=(1, 3)),
    "uneven": TreeSettings(branching=(3, (2, 0, 1), (1, 0, 2))),
    "replaced": TreeSettings(branching=(2, 2, 1), replacement=True),
    "fork": ForkSettings(width=3, policy=FixedSettings(max_tokens=4)),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9),
    "top-k": Sampling(temperature=0.9, top_k=2),
    "coupled": Sampling(temperature=0.9, coupling="gumbel"),
}


def decoded(pair, drafter, sampling="greedy", new_tokens=12):
    return proposed(pair, drafter, sampling=SAMPLINGS[sampling], new_tokens=new_tokens)


@torch.inference_mode()
def plain(model, tokens):
    """The model's logits after `tokens`, computed afresh."""
    return model(torch.tensor([tokens])).logits[0, -1]


def path(tree, node):
    return [] if node == ROOT else list(paths(tree)[node])


def test_a_greedy_tree_holds_the_most_likely_tokens_of_every_node(tiny_pair):
    draft = tiny_pair.drafts["draft"]
    seen = decoded(tiny_pair, TreeSettings(branching=(3, (2, 0, 1), 2)))
    for text, room, _, tree in seen[:12]:
        whole = static_tree([(3,), (2, 0, 1), (2, 2, 2)][:room])
        assert tree.parents == whole
        for parent, nodes in tree.children().items():
            logits = plain(draft, text + path(tree, parent))
            best = logits.topk(len(nodes)).indices.tolist()
            assert [tree.tokens[node] for node in nodes] == best
        assert set(tree.draft_probs) <= {None}
        assert set(tree.origins) <= {TokenOrigin.DRAFT}


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("sampling", ["sampled", "top-k"])
def test_a_sampled_tree_carries_what_its_tokens_were_drawn_from(tiny_pair, sampling, replacement):
    drafter = TreeSettings(branching=(3, 2, 1), replacement=replacement)
    draft, sizes = tiny_pair.drafts["draft"], set()
    for text, _, _, tree in decoded(tiny_pair, drafter, sampling)[:12]:
        for parent, nodes in tree.children().items():
            left = warp(plain(draft, text + path(tree, parent)), SAMPLINGS[sampling])
            sizes.add(len(nodes))
            for node in nodes:
                torch.testing.assert_close(tree.draft_probs[node], left, atol=1e-5, rtol=1e-3)
                assert left[tree.tokens[node]] > 0
                if not replacement:
                    left[tree.tokens[node]] = 0
                    left /= left.sum()
    few = sampling == "top-k" and not replacement
    assert max(sizes) == (2 if few else 3), "where two tokens are possible, two are drawn"


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_coupled_tree_holds_the_winners_of_the_shared_race(tiny_pair, top_k):
    sampling = SAMPLINGS["coupled"].model_copy(update={"top_k": top_k})
    engine = Engine(tiny_pair, configured(TreeSettings(branching=(3, 2)), sampling))
    seen = proposals(engine.drafter)
    engine.generate(requests(12, COUNTING[:1]))
    noise, sizes = SharedNoise(0, engine.target.vocab_size), set()
    for text, _, _, tree in seen:
        for parent, nodes in tree.children().items():
            before = text + path(tree, parent)
            q = warp(plain(tiny_pair.drafts["draft"], before), sampling)
            race = q / noise.at(len(before))
            assert [tree.tokens[n] for n in nodes] == race.topk(len(nodes)).indices.tolist()
            sizes.add(len(nodes))
    assert max(sizes) == (top_k or 3), "where two tokens are possible, two race"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_costs_a_forward_a_level_and_is_cut_at_the_end(tiny_pair, shape):
    drafter = SHAPES[shape]
    levels = {
        "4x2x2x1": static_tree([(4,), (2,) * 4, (2,) * 8, (1,) * 16]),
        "1x3": static_tree([(1,), (3,)]),
        "uneven": static_tree([(3,), (2, 0, 1), (1, 0, 2)]),
        "replaced": static_tree([(2,), (2,) * 2, (1,) * 4]),
        "fork": static_tree([(3,), *[(1,) * 3] * 3]),
    }[shape]
    rooms = set()
    for _, room, _, tree in decoded(tiny_pair, drafter, new_tokens=9):
        depth = min(room, drafter.depth)
        assert tree.depth == tree.draft_forwards == depth
        assert tree.parents == levels[: len(tree)]
        assert len(tree) == len(levels) or depth < drafter.depth
        inner = set(tree.parents)
        assert tree.draft_tokens == len(inner)
        rooms.add(min(room, drafter.depth))
    assert len(rooms) > 1, "no tree was cut"


@pytest.mark.parametrize(
    ("shape", "sampling"), [("4x2x2x1", "greedy"), ("uneven", "sampled"), ("fork", "greedy")]
)
def test_both_caches_hold_the_committed_text_as_if_just_read(tiny_pair, shape, sampling):
    """After every round, whichever path of the tree was accepted."""
    engine = Engine(tiny_pair, configured(SHAPES[shape], SAMPLINGS[sampling]), 3)
    for request in requests(24, COUNTING):
        engine.add(request)
    draft, moved = engine.drafts.open(None), 0
    while not engine.idle:
        engine.step()
        for slot, active in engine._active.items():
            text = active.state.tokens
            for runner in (engine.target, draft):
                length = runner.lengths[slot]
                if runner is draft and len(active.rounds) == 1:
                    assert length == 0, "it reads the prompt after the first round"
                    continue
                assert len(text) - 2 <= length <= len(text) - 1
                fresh = EagerRunner(runner.model, 1, engine.max_length)
                fresh.prefill([0], [text[:length]])
                for layer, own in zip(runner.cache.layers, fresh.cache.layers, strict=True):
                    for kept, read in ((layer.keys, own.keys), (layer.values, own.values)):
                        torch.testing.assert_close(
                            kept[slot, :, :length], read[0, :, :length], atol=2e-5, rtol=1e-4
                        )
            moved += active.rounds[-1].accepted > 0
    assert moved > 5, "nothing was ever kept"


FIXED, SVIP = FixedSettings(max_tokens=5), SvipSettings(threshold=2.25, max_tokens=6)


@torch.inference_mode()
def grown_plainly(model, text, drafter, levels):
    """The paths of the tree, expanded and reranked without a cache, for policy SVIP or fixed."""
    confidence: dict[tuple[int, ...], float] = {(): 1.0}
    frontier = [()]
    for _ in range(levels):
        found = {}
        for path in frontier:
            logits = model(torch.tensor([[*text, *path]])).logits[0, -1]
            q = logits.float().softmax(-1)
            entropy = -(q * q.log()).sum().item()
            for p, token in zip(*(x.tolist() for x in q.topk(drafter.children)), strict=True):
                found[(*path, token)] = confidence[path] * p, entropy
        confidence |= {path: p for path, (p, _) in found.items()}
        ranked = sorted((p for p in found if p[-1] != 0), key=lambda p: -found[p][0])
        ranked = [p for p in ranked if found[p][0] >= drafter.least]
        frontier = ranked[: drafter.expand]
        if isinstance(drafter.policy, SvipSettings):
            frontier = [p for p in frontier if math.sqrt(found[p][1]) <= drafter.policy.threshold]
        if not frontier:
            break
    del confidence[()]
    confidence = {path: p for path, p in confidence.items() if p >= drafter.least}
    return set(sorted(confidence, key=lambda p: -confidence[p])[: drafter.keep])


@pytest.mark.parametrize(("policy", "least"), [(FIXED, 0.002), (SVIP, 0.0)])
def test_trees_are_those_of_a_plain_expansion(tiny_pair, policy, least):
    drafter = DynamicTreeSettings(expand=2, children=3, keep=12, least=least, policy=policy)
    seen = proposed(tiny_pair, drafter)
    model, shapes = tiny_pair.drafts["draft"], set()
    for text, room, _, tree in seen[::5]:
        levels = min(room, drafter.policy.max_tokens)
        expected = grown_plainly(model, text, drafter, levels)
        assert set(paths(tree)) == expected
        shapes.add(tuple(tree.parents))
    assert len(shapes) > 2


@st.composite
def scored_trees(draw):
    """Parents, and log confidences that fall along every path or stay."""
    parents: list[int] = []
    scores: list[float] = []
    for node in range(draw(st.integers(0, 40))):
        parent = draw(st.integers(ROOT, node - 1))
        step = draw(st.sampled_from([0.0, 0.0, -0.1, -0.5]) | st.floats(-20, 0))
        parents.append(parent)
        scores.append((0.0 if parent == ROOT else scores[parent]) + step)
    return parents, scores


@given(scored_trees(), st.integers(1, 45), st.sampled_from([-math.inf, -5.0, -0.3, 0.0]))
def test_what_is_kept_is_connected_most_confident_and_within_the_limit(tree, limit, least):
    parents, scores = tree
    kept = rerank(scores, limit, least)
    assert kept == sorted(set(kept))
    assert len(kept) == min(limit, sum(score >= least for score in scores))
    assert all(parents[node] in (ROOT, *kept) for node in kept)
    dropped = set(range(len(scores))) - set(kept)
    if dropped and kept:
        assert min(scores[n] for n in kept) >= max(scores[n] for n in dropped)


GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9)
FEW = Sampling(temperature=0.9, top_k=2)
# Policies that differ in their inputs.
POLICIES = {
    "fixed": policy("fixed", max_tokens=4),
    "heuristic": policy("heuristic", start=2, max_tokens=8),
    "product": policy("confidence_product", threshold=0.01, max_tokens=8),
    "pre-cut": policy("pre_cut", max_tokens=8),
    "joint": policy("decision", head="joint", threshold=0.5, cumulative=True, max_tokens=8),
}


@pytest.fixture
def endless(tiny_pair, monkeypatch):
    """The pair without a token that ends texts: chains would end behind it, forks do not."""
    monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", -1)
    return tiny_pair


@pytest.mark.parametrize(
    ("name", "sampling"),
    [*((name, GREEDY) for name in POLICIES), ("product", SAMPLED), ("fixed", FEW)],
)
def test_a_fork_and_a_tree_of_width_one_are_the_chain(endless, name, sampling, bare_home):
    save_random_head(endless, "joint", bare_home / "heads" / "joint")
    policy, outcomes = POLICIES[name], []
    drafters = [DraftModelSettings(policy=policy), ForkSettings(width=1, policy=policy)]
    if name == "fixed":
        drafters.append(TreeSettings(branching=(1, 1, 1, 1)))
    for drafter in drafters:
        engine = Engine(endless, configured(drafter, sampling))
        generations = engine.generate(requests(24, COUNTING))
        outcomes.append(
            [(g.tokens, [(r.drafted, r.accepted) for r in g.rounds]) for g in generations]
        )
    assert all(outcome == outcomes[0] for outcome in outcomes)


def branches(tree, width):
    """The nodes of each branch."""
    assert tree.parents == [ROOT if n < width else n - width for n in range(len(tree))]
    return [list(range(branch, len(tree), width)) for branch in range(width)]


@torch.inference_mode()
def confidences(model, text, sampling):
    logits = model(torch.tensor([text])).logits[0]
    probs = logits.softmax(dim=-1) if sampling.greedy else warp(logits, sampling)
    return probs.amax(dim=-1).tolist()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T"])
def test_a_fork_ends_when_all_its_branches_are_below_the_threshold(tiny_pair, sampling):
    """The rule of improved MCSD, §3.3, worked out again with a plain model."""
    threshold, most, width = 0.11, 7, 3
    stops = policy("confidence", threshold=threshold, max_tokens=most)
    engine = Engine(tiny_pair, configured(ForkSettings(width=width, policy=stops), sampling), 3)
    seen = proposals(engine.drafter)
    engine.generate(requests(90, COUNTING))
    draft, lengths, disagreed = tiny_pair.drafts["draft"], [], 0
    for text, room, _, tree in seen:
        if not room:
            continue
        sure = []
        for nodes in branches(tree, width):
            whole = text + [tree.tokens[node] for node in nodes]
            found = confidences(draft, whole, sampling)[len(text) - 1 : -1]
            sure.append([c >= threshold for c in found])
        levels = list(zip(*sure, strict=True))
        stop = next((n for n, level in enumerate(levels) if not any(level)), len(levels))
        assert tree.depth == min(stop + 1, most, room)
        lengths.append(tree.depth)
        disagreed += any(any(level) and not all(level) for level in levels)
    assert len(set(lengths)) > 3, "the policy never stopped anything"
    assert disagreed > 3, "branches always agreed"


class Told:
    """The calls of a fork's policy, slot by slot."""

    def __init__(self, fork):
        self.seen: dict[int, list[int]] = {}
        self.told: list[tuple[int, int, int, list[int]]] = []
        policy = fork.policy
        go_on, observe = policy.go_on, policy.observe

        def watched_go_on(signals):
            for slot, token, position in zip(
                signals.slots, signals.tokens, signals.positions, strict=True
            ):
                if position == 1:
                    self.seen[slot] = []
                self.seen[slot].append(token)
            return go_on(signals)

        def watched_observe(slot, outcome):
            assert outcome.draft_calls == outcome.drafted  # a forward a level
            told = slot, outcome.drafted, outcome.accepted, self.seen.get(slot, [])
            self.told.append(told)
            observe(slot, outcome)

        policy.go_on, policy.observe = watched_go_on, watched_observe


def test_a_policy_that_learns_is_told_what_became_of_each_branch(tiny_pair):
    learns = policy("pre_cut", max_tokens=4)
    engine = Engine(tiny_pair, configured(ForkSettings(width=3, policy=learns)), 2)
    told = Told(engine.drafter)
    observe = engine.drafter.observe
    winners = 0

    def watched(sequence, outcome):
        nonlocal winners
        told.told.clear()
        observe(sequence, outcome)
        tree = outcome.tree
        slots = range(3 * sequence.slot, 3 * sequence.slot + 3)
        expected = []
        for slot, nodes in zip(slots, branches(tree, 3), strict=True):
            accepted = sum(node in outcome.path for node in nodes)
            expected.append((slot, tree.depth, accepted, [tree.tokens[n] for n in nodes]))
            winners += 0 < accepted == outcome.accepted and slot % 3 > 0
        assert told.told == expected

    engine.drafter.observe = watched
    engine.generate(requests(40, COUNTING))
    assert winners > 0, "the first branch always won"
