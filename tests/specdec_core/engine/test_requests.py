"""What a request may ask for beside its sampling: an end, no early end, log-probabilities, less
speculation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling, parse
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation
from tests.specdec_core.engine.test_text_warpers import DRAFTERS, PROMPTS

NEW = 24
SAMPLINGS = {
    "greedy": Sampling(repetition_penalty=1.2),
    "rejection": Sampling(temperature=0.8, top_k=20),
    "coupled": Sampling(temperature=0.8, coupling="gumbel"),
}


def under(drafter: str, sampling: Sampling | None = None) -> Configuration:
    value = {"drafter": DRAFTERS[drafter], "sampling": (sampling or Sampling()).model_dump()}
    return parse(Configuration, value, "test")


def requests(**options: Any) -> list[Request]:
    asked = {"max_new_tokens": NEW, **options}
    return [Request(str(n), prompt, seed=n, **asked) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["chain", "tree", "target tree"])
def test_log_probabilities_are_those_of_one_forward_over_the_text(
    tiny_pair: Pair, drafter: str, sampling: str
) -> None:
    engine = Engine(tiny_pair, under(drafter, SAMPLINGS[sampling]), 2)
    stop = Engine(tiny_pair, engine.configuration).generate(requests(ignore_eos=True))[1].text[9:12]
    for request in requests(logprobs=3, ignore_eos=True, stop=(stop,)):
        engine.add(request)
    chunks = [chunk for _ in iter(lambda: engine.idle, True) for chunk in engine.step()]
    origins = set()
    for finished in (chunk.finished for chunk in chunks if chunk.finished):
        own = [chunk for chunk in chunks if chunk.request_id == finished.request_id]
        assert [entry for chunk in own for entry in chunk.logprobs or ()] == finished.logprobs
        assert all(len(chunk.logprobs or ()) == len(chunk.tokens) for chunk in own)
        assert_measured(tiny_pair, finished, PROMPTS[int(finished.request_id)])
        origins |= set(finished.origins)
    assert len(origins) >= 2


@torch.inference_mode()
def assert_measured(pair: Pair, finished: Generation, prompt: tuple[int, ...]) -> None:
    logits = pair.target(torch.tensor([[*prompt, *finished.tokens]])).logits[0]
    scores = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    assert finished.logprobs is not None
    assert [entry.token for entry in finished.logprobs] == finished.tokens
    for row, entry in zip(scores, finished.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        best = row.topk(3)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(float(row[t]), abs=1e-4) for t, value in entry.top)


def test_no_log_probabilities_unless_asked_for(tiny_pair: Pair) -> None:
    [bare] = Engine(tiny_pair).generate(requests()[:1])
    [own] = Engine(tiny_pair).generate(requests(logprobs=0)[:1])
    assert bare.logprobs is None
    assert own.logprobs is not None
    assert [entry.top for entry in own.logprobs] == [()] * len(own.tokens)


@pytest.fixture(scope="module")
def free(tiny_pair: Pair) -> list[Generation]:
    """Without an end."""
    return Engine(tiny_pair, AUTOREGRESSIVE, 3).generate(requests(ignore_eos=True))


@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_a_stop_token_ends_the_text_and_has_no_text(
    tiny_pair: Pair, free: list[Generation], drafter: str
) -> None:
    token = free[0].tokens[6]
    asked = requests(stop_tokens=frozenset({token}), ignore_eos=True)
    generations = Engine(tiny_pair, under(drafter), 3).generate(asked)
    assert generations[0].finish_reason == "stop"
    for generation, whole in zip(generations, free, strict=True):
        if token in whole.tokens:
            end = whole.tokens.index(token)
            assert generation.tokens == whole.tokens[: end + 1]
            assert generation.text == tiny_pair.tokenizer.decode(
                whole.tokens[:end], skip_special_tokens=True
            )
        else:
            assert generation.tokens == whole.tokens


def test_no_text_ends_before_its_least_length(tiny_pair: Pair, free: list[Generation]) -> None:
    token = free[0].tokens[6]
    asked = requests(stop_tokens=frozenset({token}), min_tokens=9)
    for generation in Engine(tiny_pair, under("tree"), 3).generate(asked):
        assert len(generation.tokens) >= 9
        assert not {0, token} & set(generation.tokens[:9])


@pytest.mark.parametrize("drafter", ["chain", "tree", "target tree", "hybrid"])
def test_requests_of_one_batch_speculate_as_they_like(
    tiny_pair: Pair, free: list[Generation], drafter: str
) -> None:
    limits = (0, 1, None)
    asked = [
        replace(request, speculate=most)
        for request, most in zip(requests(ignore_eos=True), limits, strict=True)
    ]
    generations = Engine(tiny_pair, under(drafter), 3).generate(asked)
    assert [g.tokens for g in generations] == [g.tokens for g in free]
    none, one, any_number = (max(r.depth for r in g.rounds) for g in generations)
    assert (none, one) == (0, 1)
    assert any_number > 1
    assert sum(r.drafted for r in generations[0].rounds) == 0


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"min_tokens": NEW + 1}, "min_tokens must be between 0 and max_new_tokens"),
        ({"logprobs": -1}, "logprobs must be between 0"),
        ({"speculate": -1}, "speculate must be at least 0"),
        ({"stop_tokens": frozenset({10_000})}, "stop_tokens: 10000 is no token"),
        ({"sampling": Sampling(logit_bias={10_000: 1})}, "logit_bias: 10000 is no token"),
        (
            {"stop_tokens": frozenset(range(320)), "min_tokens": 1},
            "every token would end the text",
        ),
    ],
)
def test_what_cannot_be_met_is_refused(
    tiny_pair: Pair, options: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(UserError, match=wrong):
        Engine(tiny_pair).add(replace(requests()[0], **options))
