"""An answer that several engines write is one answer."""

from __future__ import annotations

from cluster.serving.stream import _StreamedAnswer
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair


def test_a_prompts_log_probabilities_are_told_once(tiny_pair: Pair) -> None:
    asked = {"logprobs": 1, "prompt_logprobs": True, "ignore_eos": True}
    request = Request("r", tuple(range(5, 40)), 24, **asked)
    [whole] = Engine(tiny_pair).generate([request])
    failing, other = Engine(tiny_pair), Engine(tiny_pair)
    answer = _StreamedAnswer(request, 0)
    failing.add(request)
    first, *told = [answer.took(chunk) for _ in range(3) for chunk in failing.step()]
    told += [answer.took(chunk) for chunk in other.stream(answer.rest())]
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert not any(chunk.prompt_logprobs for chunk in told)
    finished = told[-1].finished
    assert finished.prompt_logprobs == whole.prompt_logprobs
    assert finished.tokens == whole.tokens
    assert finished.logprobs is not None
    assert [entry.token for entry in finished.logprobs] == whole.tokens


def test_what_failed_before_the_first_token_tells_them_later(tiny_pair: Pair) -> None:
    request = Request("r", (1, 2, 3), 2, logprobs=0, prompt_logprobs=True)
    [whole] = Engine(tiny_pair).generate([request])
    answer = _StreamedAnswer(request, 0)
    [*_, last] = [answer.took(chunk) for chunk in Engine(tiny_pair).stream(answer.rest())]
    assert last.finished.prompt_logprobs == whole.prompt_logprobs
