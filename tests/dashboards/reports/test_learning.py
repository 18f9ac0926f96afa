"""A learning curve says what was measured and what is extrapolated."""

from __future__ import annotations

import numpy as np
import pytest

from dashboards.reports.trained import learning
from specdec_core.base.bundled import bundled_path
from specdec_core.training.eagle.finished import EagleTrainingCard
from specdec_core.training.recorded.extrapolation import fitted
from specdec_core.training.recorded.finished import Finished, load_card


def test_a_power_law_is_found_again() -> None:
    tokens = [1e5, 3e5, 1e6, 2e6]
    law = fitted(tokens, [0.9 - 3 * n**-0.15 for n in tokens], 0.9)
    assert law is not None
    assert law.slope == pytest.approx(-0.15)
    assert law.at(1e7) == pytest.approx(0.9 - 3 * 1e7**-0.15)
    assert law.at(law.tokens_for(0.6)) == pytest.approx(0.6)
    assert np.isinf(law.tokens_for(0.9))
    assert fitted(tokens[:2], [0.1, 0.2], 0.9) is None


def test_the_bundled_head_is_still_rising() -> None:
    folder = bundled_path("smollm2-eagle")
    card = load_card(folder, EagleTrainingCard)
    frame = learning(Finished("head", folder, card)).frame
    assert frame is not None
    greedy = frame["from any token, greedy"]
    assert list(frame["from"]) == ["measured"] * len(card.curve) + ["extrapolated"] * 3
    assert greedy.iloc[-3:].is_monotonic_increasing
    assert greedy.iloc[-1] < card.limit
    assert greedy.iloc[len(card.curve) - 1] == 1 + card.curve[-1].acceptance.greedy_length
