"""From any logits and any accepted settings come distributions, and from these possible tokens."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from specdec_core.config import Configuration, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.tokens import operator
from specdec_core.tokens.coupling import SharedNoise, scores
from specdec_core.tokens.sampling import distributions, draw, draw_siblings, warp
from specdec_core.tokens.verification import residual
from tests.specdec_core.tokens.test_coupling import acceptance


@pytest.fixture(scope="module", autouse=True, params=["operators", "torch"])
def way(request):
    """With the operators for CPUs, and with torch, as on GPUs."""
    if request.param == "operators" and not operator.available():
        pytest.skip("needs a C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(operator, "fits", lambda numbers: False)
        yield


LAST = math.nextafter(1, 0)  # the largest of random.random()'s numbers
UNIFORMS = [0.0, 0.5, 1 - 2**-24, LAST]
TINY = 5e-324

LOGIT = st.one_of(
    st.sampled_from([-math.inf, -3.4e38, -1e38, -1e4, 0.0, 1e-38, 1.0, 1e4, 1e38, 3.4e38]),
    st.floats(-20, 20, width=32),
)
VOCABULARY = st.shared(st.integers(1, 12), key="vocabulary")
POSSIBLE = VOCABULARY.flatmap(
    lambda size: st.one_of(
        st.lists(LOGIT, min_size=size, max_size=size),
        LOGIT.map(lambda logit: [logit] * size),
        st.integers(0, size - 1).map(lambda n: [0.0 if i == n else -math.inf for i in range(size)]),
    )
).filter(lambda logits: max(logits) > -math.inf)
SAMPLING = st.builds(
    Sampling,
    temperature=st.one_of(
        st.sampled_from([TINY, 1e-40, 1.2e-38, 1e-37, 1e-30, 1e-20, 0.5, 1.0, 1e20, 1e38]),
        st.floats(0, 1e38, exclude_min=True),
    ),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 10**30]),
    top_p=st.one_of(
        st.sampled_from([1.0, 1.0, LAST, 0.9, 1e-50, TINY]), st.floats(0, 1, exclude_min=True)
    ),
)


def assert_distribution(row):
    assert row.isfinite().all()
    assert (row >= 0).all()
    assert float(row.double().sum()) == pytest.approx(1, abs=1e-5)


@given(POSSIBLE, SAMPLING, POSSIBLE)
@example([1.0, 2.0, -math.inf], Sampling(temperature=1.0, top_p=1e-50), [0.0, 0.0, 0.0])
@example([1e38, -1e38, 3e38], Sampling(temperature=0.5), [0.0, -math.inf, -math.inf])
@example([-math.inf, -1e4, 0.0], Sampling(temperature=1e20, top_p=1e-50), [0.0, 0.0, 0.0])
def test_tokens_come_from_distributions_and_are_possible(target, sampling, draft):
    logits = torch.tensor([target, draft])
    both = distributions(logits, [sampling, sampling])
    if sampling.greedy:
        assert both is None
        return
    p, q = both
    for row, own in ((p, logits[0]), (q, logits[1])):
        assert_distribution(row)
        assert not row[own == -math.inf].any()
        likeliest = own / sampling.temperature  # several may be alike
        likeliest = likeliest == likeliest.max()
        assert row[likeliest].max() == row.max(), "the most likely token stays the most likely"
        for uniform in UNIFORMS:
            [token] = draw(row[None], [uniform])
            assert row[token] > 0
        noises, positions = [SharedNoise(0, len(row))] * 8, range(8)
        for token in scores(row.expand(8, -1), noises, positions).argmax(-1):
            assert row[token] > 0
    assert 0 <= float(acceptance(p, q)) <= 1 + 1e-5
    for token in range(len(q)):
        for own, chance in ((q, q[token]), (None, 1.0)):
            if not p[token] < chance:
                continue  # it is never rejected
            left = residual(p, token, own)
            assert_distribution(left)
            assert not left[token]
            for uniform in UNIFORMS:
                [other] = draw(left[None], [uniform])
                assert left[other] > 0
                assert p[other] > 0


@given(POSSIBLE, SAMPLING, st.lists(st.sampled_from(UNIFORMS), min_size=1, max_size=6))
@example([0.0, -100.0, -100.0, -103.0], Sampling(temperature=1.0), [0.5, 0.5, 0.5])
def test_siblings_come_from_distributions_and_are_possible(logits, sampling, uniforms):
    rows = distributions(torch.tensor([logits]), [sampling])
    if rows is None:
        return
    [row] = rows
    for replacement in (False, True):
        [tokens], sources = draw_siblings(row[None], [uniforms], replacement)
        possible = len(uniforms) if replacement else min(len(uniforms), int((row > 0).sum()))
        assert len(tokens) == possible
        assert replacement or len(set(tokens)) == len(tokens)
        for token, source in zip(tokens, sources, strict=False):
            assert_distribution(source[0])
            assert source[0, token] > 0


@given(
    st.lists(st.sampled_from([0.0, 0.0, TINY, 1e-320, 1e-45, 1e-8, 0.1, 1.0]), min_size=1),
    st.floats(0, 1, exclude_max=True),
)
@example([TINY, 0.0], 0.9)
@example([0.1] * 10 + [0.0], LAST)
def test_only_what_has_weight_is_drawn(weights, uniform):
    for kind in (torch.float32, torch.float64):
        row = torch.tensor([weights], dtype=kind)
        if row.any():
            [token] = draw(row, [uniform])
            assert row[0, token] > 0


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
@pytest.mark.parametrize("temperature", [TINY, 1e-40, 1e-31])
def test_a_temperature_too_small_to_divide_by_is_greedy(tiny_pair, temperature, coupling):
    sampling = Sampling(temperature=temperature, coupling=coupling)
    assert sampling.greedy
    assert sampling == Sampling(coupling=coupling)
    request = Request("", (5, 6, 7), 12)
    greedy, cold = (
        Engine(tiny_pair, Configuration(sampling=own)).generate([request])[0].tokens
        for own in (Sampling(), sampling)
    )
    assert cold == greedy


def test_the_smallest_temperature_draws_the_most_likely_token():
    logits = torch.tensor([[3.0, 60000.0, 59999.9, -math.inf]])
    for temperature in (1e-30, 1e-20):
        assert warp(logits, Sampling(temperature=temperature)).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-40, 1e39])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_numbers_that_are_no_setting_are_refused(name, value):
    with pytest.raises(ValidationError, match=name):
        Sampling(**{name: value})


@pytest.mark.parametrize("vocabulary", [7, 300, 5_000])
@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_a_nucleus_is_that_of_the_whole_vocabulary_in_order(vocabulary, spread):
    """For nuclei of a few tokens and of thousands."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, 2, vocabulary, generator=generator)
    logits = logits * spread * torch.tensor([0.1, 1.0, 2.0])[:, None, None]
    for mass in (0.05, 0.5, 0.9):
        found = warp(logits, Sampling(temperature=1.0, top_p=mass))
        for row, kept in zip(logits.view(-1, vocabulary), found.view(-1, vocabulary), strict=True):
            ordered, order = row.double().softmax(dim=-1).sort(descending=True)
            count = int((kept > 0).sum())
            assert set(kept.nonzero()[:, 0].tolist()) == set(order[:count].tolist())
            reached = float(ordered[:count].sum())  # up to a rounding of float32
            assert reached - float(ordered[count - 1]) - 1e-6 < mass < reached + 1e-6
            nucleus = torch.zeros(vocabulary, dtype=torch.float64)
            nucleus[order[:count]] = ordered[:count] / ordered[:count].sum()
            torch.testing.assert_close(kept.double(), nucleus, atol=1e-6, rtol=1e-4)


FILTERS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3, top_k=1),
    Sampling(temperature=1.0, top_k=50),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.5, top_p=0.999),
    Sampling(temperature=0.9, min_p=0.1),
    Sampling(temperature=2.0, top_k=300, top_p=0.5, min_p=1e-4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 32, 49_157])
@pytest.mark.parametrize("sampling", FILTERS)
def test_the_operators_find_what_torch_finds(sampling, vocabulary, dtype):
    if not operator.available():
        pytest.skip("needs a C++ compiler")
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(5, vocabulary, generator=generator)).to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    logits[:, 0] = 1
    uniforms = torch.rand(5, 3, generator=generator, dtype=torch.float64).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "fits", lambda numbers: False)
        expected = warp(logits, sampling)
        drawn = draw_siblings(expected, uniforms, replacement=True)[0]
    found = operator.warp(logits, sampling)
    # Of equal logits it is open which of them belong to a nucleus, and where that ends in a long
    # tail is a matter of rounding.
    for one, other in ((found.sort().values, expected.sort().values), (found, expected)):
        if dtype == torch.float32 or one is not found:
            assert (one - other).abs().sum(dim=-1).max() < 1e-5
            if sampling.top_p == 1 or vocabulary < 10_000:
                assert torch.equal(one > 0, other > 0)
    places = torch.tensor(uniforms, dtype=torch.float64)
    assert operator.quantiles(expected, places).tolist() == drawn
