"""A sequence that one engine has begun is continued by another as the first would have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import PROMPT, VOCABULARY, exact_distribution, toy_pair
from specdec_core.config import Sampling
from specdec_core.engine import Chunk, Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import Pair
from specdec_core.tokens import sampling as sampling_module
from tests.specdec_core.kinds import chain, configured

CHAIN = configured(chain(max_tokens=2))
FIXED = {
    "greedy": Sampling(),
    "gumbel": Sampling(temperature=0.9, top_k=40, coupling="gumbel"),
}
BEGUN = 2  # tokens that the first of two engines writes on the toy pair


def begun(engine: Engine, request: Request, rounds: int) -> list[Chunk]:
    """The chunks of a request's first rounds."""
    engine.add(request)
    chunks = [chunk for _ in range(rounds) for chunk in engine.step()]
    engine.cancel(request.id)
    return chunks


def behind(request: Request, chunks: list[Chunk]) -> Request:
    written = [pair for c in chunks for pair in zip(c.tokens, c.origins, strict=True)]
    return replace(request, written=tuple(written))


@pytest.mark.parametrize("rule", FIXED)
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_fixed_text_goes_on_as_it_would_have(tiny_pair: Pair, rule: str, rounds: int) -> None:
    request = Request("r", tuple(range(5, 40)), 24, FIXED[rule], seed=3, ignore_eos=True)
    [whole] = Engine(tiny_pair, CHAIN).generate([request])
    first = begun(Engine(tiny_pair, CHAIN), request, rounds)
    other = Engine(tiny_pair, CHAIN, limits=Limits(2, share_prefixes=True))
    chunks = list(other.stream(behind(request, first)))
    assert chunks[-1].finished is not None
    assert chunks[-1].finished.tokens == whole.tokens
    assert chunks[-1].finished.text == whole.text
    assert len(chunks[-1].finished.origins) == len(chunks[-1].finished.token_seconds) == 24
    new = [token for chunk in chunks for token in chunk.tokens]
    assert new == whole.tokens[24 - len(new) :]
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_a_stop_string_over_the_border_ends_the_text(tiny_pair: Pair) -> None:
    request = Request("r", tuple(range(5, 40)), 24, ignore_eos=True)
    chunks = list(Engine(tiny_pair, CHAIN).stream(request))
    before, after = chunks[1].text, chunks[2].text
    stopped = replace(request, stop=(before[-1] + after[0],))
    [whole] = Engine(tiny_pair, CHAIN).generate([stopped])
    first = begun(Engine(tiny_pair, CHAIN), stopped, 2)
    [found] = Engine(tiny_pair, CHAIN).generate([behind(stopped, first)])
    assert (found.text, found.finish_reason) == (whole.text, "stop")
    assert found.tokens == whole.tokens


def continued_p_value() -> float:
    """Of texts that one engine begins and another one ends, against the target's distribution."""
    pair, sampling, length = toy_pair(), Sampling(temperature=1.0), 4
    configuration = CHAIN.model_copy(update={"sampling": sampling})
    asked = [Request(str(n), PROMPT, BEGUN, seed=n) for n in range(2000)]
    starts = Engine(pair, configuration, slots=256).generate(asked)
    rest = [
        replace(
            request,
            max_new_tokens=length,
            written=tuple(zip(start.tokens, start.origins, strict=True)),
        )
        for request, start in zip(asked, starts, strict=True)
    ]
    counts = [0] * VOCABULARY**length
    for generation in Engine(pair, configuration, slots=256).generate(rest):
        place = 0
        for token in generation.tokens:
            place = place * VOCABULARY + token
        counts[place] += 1
    return goodness_of_fit(np.array(counts), exact_distribution(pair, sampling, length))


def test_a_sampled_continuation_has_the_targets_distribution() -> None:
    assert continued_p_value() > 1e-3


def test_the_test_notices_random_numbers_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Again(sampling_module.RandomStream):
        def __init__(self, seed: int, vocab_size: int, written: int = 0, earlier: int = 0) -> None:
            super().__init__(seed, vocab_size)

    monkeypatch.setattr("specdec_core.engine.engine.RandomStream", Again)
    assert continued_p_value() < 1e-9
