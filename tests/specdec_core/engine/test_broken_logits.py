"""A request with logits that are NaN or infinite ends with an error, and harms no other request."""

from dataclasses import replace

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.config.kinds import DRAFTERS, POLICIES
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.cache import PooledCache
from specdec_core.models.pair import load_pair
from specdec_core.tokens.sampling import draw, draw_siblings, warp
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.drafting.proofs import PROMPTS
from tests.specdec_core.kinds import drafter, policy

NAN, INFINITE = 31, 32  # tokens with such embeddings; the proofs' texts have neither
FROM_TEXTS = {"prompt_lookup", "suffix", "token_cache"}
NEVER = ((NAN, -100.0), (INFINITE, -100.0))  # so that no healthy text comes to have one
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, top_k=8, logit_bias=NEVER),
    Sampling(temperature=0.8, top_p=0.9, min_p=0.01, logit_bias=NEVER),
    Sampling(temperature=1.0, coupling="gumbel", logit_bias=NEVER),
]


@pytest.fixture(scope="module")
def pair(tiny_spec):
    """The pair with a target that has two tokens that break its logits."""
    pair = load_pair(tiny_spec)
    poison(pair.target)
    return pair


@torch.no_grad()
def poison(model, every=False):
    """The output layer, which is packed, stays unchanged."""
    table = model.get_input_embeddings().weight
    table[NAN], table[INFINITE] = torch.nan, torch.inf
    if every:
        table[:] = torch.nan


def asked(sampling, tokens=24):
    """Healthy requests, and among them broken ones, which end sooner."""
    healthy = [
        Request(f"healthy {n}", text, tokens, sampling, seed=n, ignore_eos=True)
        for n, text in enumerate(PROMPTS)
    ]
    broken = [
        Request("broken", (5, 6, NAN, 7), tokens, sampling),
        Request("infinite", (*range(40, 80), INFINITE), tokens, sampling),
    ]
    return [*healthy[:1], *broken, *healthy[1:]]


def served(engine, requests):
    for request in requests:
        engine.add(request)
    done = {}
    while not engine.idle:
        done |= {c.request_id: c.finished for c in engine.step() if c.finished}
    return done


@pytest.mark.parametrize(
    ("kind", "sampling", "pooled"),
    [
        (None, 1, False),
        ("draft_model", 0, False),
        ("draft_model", 1, True),
        ("tree", 0, True),
        ("tree", 2, False),
        ("prompt_lookup", 3, False),
        ("target_tree", 0, False),
        ("target_tree", 1, True),
    ],
)
def test_a_broken_request_ends_with_an_error_and_harms_no_other(
    pair, tiny_pair, sampling, kind, pooled
):
    sampling = SAMPLINGS[sampling]
    changes = {"branching": [1, 2]} if kind == "target_tree" else {}
    own = AUTOREGRESSIVE if kind is None else Configuration(drafter=drafter(kind, **changes))
    healthy = [r for r in asked(sampling) if r.id.startswith("healthy")]
    # Two slots: the broken ones' are taken by healthy requests.
    how = {"pooled": pooled, "compact": pooled}  # a pool stays one where its rows are packed
    expected = served(Engine(replace(tiny_pair, **how), own, 2), healthy)
    engine = Engine(replace(pair, **how), own, 2)
    found = served(engine, asked(sampling))
    assert isinstance(engine.target.cache, PooledCache) == pooled
    assert {name: g.finish_reason for name, g in found.items() if g.failure} == {
        "broken": "error",
        "infinite": "error",
    }
    assert all(r.accepted >= 0 for generation in found.values() for r in generation.rounds)
    failure = found["broken"].failure
    assert "tokens of this sequence the target's logits are NaN or infinite" in failure
    assert not found["broken"].tokens
    if sampling.fixed_output:
        for name, generation in expected.items():
            assert found[name].tokens == generation.tokens
    assert all(found[r.id].finish_reason == "length" for r in healthy)


def test_offline_a_broken_request_is_named_and_the_engine_goes_on(pair):
    engine = Engine(pair, slots=2)
    with pytest.raises(UserError, match=r"^broken: after 4 tokens of this sequence"):
        engine.generate(asked(Sampling()))
    assert engine.idle
    with pytest.raises(UserError, match=r"^broken: "):
        list(engine.stream(asked(Sampling())[1]))
    request = Request("healthy", PROMPTS[1], 8)
    assert engine.generate([request])[0].tokens


@pytest.mark.parametrize(("packs", "pooled"), [(False, False), (True, False), (True, True)])
def test_a_candidate_that_breaks_its_row_costs_a_round(pair, tiny_pair, monkeypatch, packs, pooled):
    configuration = Configuration(drafter=drafter("draft_model"))
    requests = [Request(str(n), text, 24, ignore_eos=True) for n, text in enumerate(PROMPTS)]
    expected = [g.tokens for g in Engine(tiny_pair).generate(requests)]
    assert not any(NAN in tokens for tokens in expected)
    engine = Engine(replace(pair, pooled=pooled, compact=pooled), configuration, 3)
    engine.target.packs = packs and engine.target.packs
    propose, broken = engine.drafter.propose, []

    def wrong(states):
        trees = propose(states)
        for tree in trees:
            if len(tree) > 1 and len(broken) < 9:
                broken.append(tree)
                tree.tokens[1] = NAN
        return trees

    monkeypatch.setattr(engine.drafter, "propose", wrong)
    assert [g.tokens for g in engine.generate(requests)] == expected
    assert len(broken) == 9


@pytest.fixture(scope="module")
def drafted(tiny_spec, request):
    """The pair with a draft that has "some" embeddings that are NaN, or "no" other ones."""
    pair = load_pair(tiny_spec)
    poison(pair.drafts["draft"], request.param == "no")
    return pair


MODELS = sorted({*DRAFTERS} - FROM_TEXTS)
CASES = [*(("some", kind, 0) for kind in MODELS), *(("no", kind, 1) for kind in MODELS)]
CASES += [("no", "draft_model", 0), ("no", "tree", 0)]


@pytest.mark.parametrize(("drafted", "kind", "sampling"), CASES, indirect=["drafted"])
def test_a_broken_draft_costs_candidates_alone(drafted, kind, sampling):
    sampling = SAMPLINGS[sampling]
    texts = [(5, 6, NAN, 7), PROMPTS[1]]
    requests = [Request(str(n), text, 8, sampling) for n, text in enumerate(texts)]
    changes = {"target_tree": {"branching": [1, 2]}, "target_fork": {"width": 1}}.get(kind, {})
    link = InTurns(drafted, 0)
    configuration = Configuration(drafter=drafter(kind, **changes))
    engine = Engine(linked(drafted, link), configuration, 2)
    found = [g.tokens for g in engine.generate(requests)]
    if sampling.greedy:
        assert found == [g.tokens for g in Engine(drafted).generate(requests)]


@pytest.mark.parametrize("drafted", ["some"], indirect=True)
@pytest.mark.parametrize("kind", [k for k in POLICIES if policy(k).decodes and not policy(k).heads])
def test_a_broken_draft_stops_no_policy(drafted, kind):
    configuration = Configuration(drafter=DraftModelSettings(policy=policy(kind)))
    requests = [Request(str(n), (*text, NAN), 8) for n, text in enumerate(PROMPTS[:2])]
    expected = [g.tokens for g in Engine(drafted).generate(requests)]
    assert [g.tokens for g in Engine(drafted, configuration, 2).generate(requests)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS[1:3], ids=["top-k", "top-p"])
def test_rows_that_are_no_numbers_spoil_no_other_row(dtype, sampling):
    torch.manual_seed(0)
    logits = torch.randn(6, 999).to(dtype)
    expected = warp(logits, sampling)
    logits[1], logits[2, 5], logits[3, 7], logits[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    found = warp(logits, sampling)
    torch.testing.assert_close(found[[0, 5]], expected[[0, 5]])
    assert found[1:5].isnan().any(dim=1).all()
    assert all(0 <= token < 999 for token in draw(found, [0.3] * 6))
    siblings, _ = draw_siblings(found, [[0.2, 0.4]] * 6)
    assert all(0 <= token < 999 for row in siblings for token in row)
