"""Which sampling settings a request may ask for."""

from __future__ import annotations

import pytest

from cluster.serving.openai_protocol import ApiError, CompletionRequest
from specdec_core.config import Sampling


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1e39", "-1e-40"])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_numbers_that_are_no_setting_are_refused_by_name(name: str, number: str) -> None:
    with pytest.raises(ApiError, match=f"{name}: ") as refused:
        CompletionRequest.from_body(f'{{"prompt": "x", "{name}": {number}}}'.encode())
    assert refused.value.status == 400
    assert refused.value.body.error.param == name


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    asked = CompletionRequest.from_body(b'{"prompt": "x", "temperature": 1e-40}')
    assert asked.sampling(Sampling(temperature=0.7)).greedy
