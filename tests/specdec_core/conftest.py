"""What tests of several rooms share."""

import pytest

from tests.load_timer import recorded


@pytest.fixture(scope="session")
def replay(tiny_pair, tmp_path_factory):
    """Of a recording of four prompts."""
    return recorded(tiny_pair, tmp_path_factory.mktemp("recorded"))
