"""On a GPU verification computes all chances of a tree at once: each is the chance of its node."""

import torch

from specdec_core.tokens import verification as verify
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT, RemoteDistribution, TokenTree

VOCAB = 7


def tree_and_target(seed):
    generator = torch.Generator().manual_seed(seed)
    tree, parents = TokenTree(), [ROOT, 0, 0, 1, ROOT, 4]
    for node, parent in enumerate(parents):
        q = torch.rand(VOCAB, generator=generator).softmax(0)
        token = int(torch.randint(VOCAB, (), generator=generator))
        sources = (q, None, RemoteDistribution(float(q[token]), lambda q=q: q))
        tree.add(token, parent, TokenOrigin.DRAFT, sources[node % 3])
    p = (3 * torch.rand(len(parents) + 1, VOCAB, generator=generator)).softmax(1)
    return tree, p


def test_chances_are_those_of_each_node():
    tree, p = tree_and_target(0)
    for node, (own_p, own_q) in enumerate(verify.chances(tree, p)):
        token, q = tree.tokens[node], tree.draft_probs[node]
        assert own_p == float(p[tree.parents[node] + 1, token])
        expected = (
            1.0 if q is None else q.probability if isinstance(q, RemoteDistribution) else q[token]
        )
        assert own_q == float(expected)
    assert verify.chances(TokenTree(), p[:1]) == []


def test_verdicts_do_not_depend_on_how_chances_are_looked_up():
    for seed in range(60):
        tree, p = tree_and_target(seed)
        near = verify.verify_sampled(tree, p, RandomStream(seed, VOCAB))
        known = verify.chances(tree, p)
        far = verify.verify_sampled(tree, p, RandomStream(seed, VOCAB), known=known)
        assert (far.path, far.token, far.corrected) == (near.path, near.token, near.corrected)
