"""Static trees: which tokens they hold, how they were drawn, what the caches hold afterwards."""

import pytest
import torch

from specdec_core.config import Sampling
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.tree.settings import ForkSettings, TreeSettings
from specdec_core.engine import Engine
from specdec_core.models.eager import EagerRunner
from specdec_core.tokens.coupling import SharedNoise
from specdec_core.tokens.sampling import warp
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT
from specdec_core.tokens.topology import k_configuration, static_tree
from tests.specdec_core.drafting.proofs import COUNTING, paths, proposals, proposed, requests
from tests.specdec_core.kinds import configured

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
        "4x2x2x1": k_configuration((4, 2, 2, 1)),
        "1x3": k_configuration((1, 3)),
        "uneven": static_tree([(3,), (2, 0, 1), (1, 0, 2)]),
        "replaced": k_configuration((2, 2, 1)),
        "fork": k_configuration((3, 1, 1, 1)),
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
