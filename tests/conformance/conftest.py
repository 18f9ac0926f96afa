"""The server that clients are sent to."""

from tests.cluster.serving.conftest import chat_url

__all__ = ["chat_url"]
