"""Requests that the tests of recordings share."""

import pytest

from specdec_core.engine import Request
from tests.specdec_core.drafting.proofs import PROMPTS
from tests.specdec_core.recordings.recorded import TOKENS


@pytest.fixture(scope="session")
def requests():
    return [Request(str(n), tokens, TOKENS, seed=n) for n, tokens in enumerate(PROMPTS)]
