"""A profile that the tests of costs share."""

import pytest

from specdec_core.cost import ForwardCost, Measurement
from tests.specdec_core.cost.examples import measure, profile_of


@pytest.fixture
def profile():
    target = ForwardCost.fit(measure((1, 2, 4, 8, 16), (64, 256, 512), (1, 4)))
    flat = Measurement(width=1, context=256, batch=1, seconds=1e-3)
    drafts = {"small": ForwardCost.fit([flat])}
    return profile_of(target, drafts, round_overhead=1e-4, draft_overhead={"small": 2e-4})
