"""A server that runs in one mode and decodes single requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self


class Peer(ABC):
    """Another program that completes prompts with a pair's models, one request at a time.

    A context manager: entering loads what it needs, which can take minutes; leaving frees it.

    Attributes:
        name: what tables call it
        version: its version, e.g. `transformers 5.23.0`; complete once it is open
        settings: everything that decides how it runs, as JSON; complete once it is open
        steps: of the last request, the tokens that each forward of the target added, where known
        with_ours: whether it runs with settings or a plug-in of this library
    """

    name: str
    version: str
    settings: dict[str, Any]
    steps: list[int] | None = None
    with_ours: bool = False

    @abstractmethod
    def open(self) -> None:
        """Start. Opening twice does nothing.

        Raises:
            UserError: it does not run here, with the reason.
        """

    @abstractmethod
    def decode(
        self,
        prompt_tokens: tuple[int, ...],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        """The new tokens of one request, up to and with the first end token. Greedy at temperature
        0, else drawn from the whole distribution (no top-k, no top-p) with `seed`, as far as the
        peer uses it: vLLM's draft models do not."""

    def forget(self) -> None:  # noqa: B027 (most learn nothing)
        """Forget what was learned from earlier requests, as after a new start."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Free what `open` took. Closing twice does nothing."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
