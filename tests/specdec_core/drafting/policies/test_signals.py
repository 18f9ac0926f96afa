"""What a policy reads is the draft distribution's, wherever it was computed."""

from __future__ import annotations

import pytest
import torch

from specdec_core.drafting.policies.signals import Signals
from specdec_core.models.runner import Output

LOGITS = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.5], [1.0, 1.5, 2.0]])


@pytest.mark.parametrize("name", ["probability", "top_probability"])
def test_a_forward_that_says_how_sure_it_is_is_believed(name: str) -> None:
    """Of tokens that were not the most likely ones nothing is known beforehand."""
    tokens = [1, 0, 2]
    expected = LOGITS.softmax(dim=-1).amax(dim=-1)
    read = Output([1, 1, 1], LOGITS)
    told = Output([1, 1, 1], LOGITS, confidence=torch.tensor([0.1, 0.2, 0.3]))
    for source, own in ((None, expected), (read, expected), (told, told.confidence)):
        signals = Signals([4, 5, 6], tokens, [1, 1, 1], LOGITS, None, source=source)
        signals.fetch([name])
        assert getattr(signals, name) == pytest.approx(own.tolist())
        part = Signals([4, 5, 6], tokens, [1, 1, 1], LOGITS, None, source=source).only([2, 0])
        assert getattr(part, name) == pytest.approx(own[[2, 0]].tolist())
