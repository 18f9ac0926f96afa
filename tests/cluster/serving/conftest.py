"""One server of a chat pair for all tests that are clients of it."""

import openai
import pytest

from specdec_core.engine import Engine
from specdec_core.servers.process import running
from tests.configurations import CHAIN
from tests.local_server import engine_server


@pytest.fixture(scope="session")
def chat_url(chat_pair):
    with running(engine_server(chat_pair, CHAIN, slots=4)) as url:
        yield url


@pytest.fixture(scope="session")
def client(chat_url):
    return openai.OpenAI(base_url=f"{chat_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def alone(chat_pair):
    """The target by itself: what the served configuration, which is lossless, has to say, too."""
    return Engine(chat_pair)
