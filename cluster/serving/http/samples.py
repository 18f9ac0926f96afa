"""A sample of the answered prompts, kept in files where the user asks for it. It does not delay an
answer: threads prepare and write the prompts once the answer has begun."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from cluster.serving.protocol.generation import GenerationRequest
from specdec_core.prompts.prompt import Prompt
from specdec_core.prompts.shards import keep_within, write_shard

logger = logging.getLogger(__name__)

ROWS = 256  # prompts that fill a file
WRITE_SECONDS = 300.0  # after which fewer are written


@dataclass(frozen=True)
class PromptSampling:
    """Keep the prompts of a `share` of the answered requests in `folder`, up to `limit` bytes:
    beyond that the oldest files are deleted."""

    folder: Path
    share: float = 0.05
    limit: int = 200_000_000


class Samples:
    """The sampled prompts, until they are written."""

    def __init__(self, sampling: PromptSampling, seed: int | None = None) -> None:
        self.sampling = sampling
        self._random = Random(seed)
        self._sampled: list[Prompt] = []
        self._adding: set[asyncio.Task[None]] = set()
        self._failed = False

    def draws(self) -> bool:
        """Whether the next request is in the sample."""
        return self._random.random() < self.sampling.share

    def offer(self, body: GenerationRequest, tokenizer: Any) -> None:
        """Add the prompts of an answered request in the background, if it is in the sample."""
        if self.draws():
            task = asyncio.create_task(self._add(body, tokenizer))
            self._adding.add(task)
            task.add_done_callback(self._adding.discard)

    async def _add(self, body: GenerationRequest, tokenizer: Any) -> None:
        prompts = await asyncio.to_thread(body.sampled_prompts, tokenizer)
        self._sampled += prompts  # `+= await` would read the list before it waits
        if len(self._sampled) >= ROWS:
            await self.write()

    async def write(self) -> None:
        """Write the prompts sampled since the last call."""
        sampled, self._sampled = self._sampled, []
        if sampled:
            await asyncio.to_thread(self._write, sampled)

    async def finish(self) -> None:
        """Write the rest, with what is still being added."""
        await asyncio.gather(*self._adding)
        await self.write()

    def _write(self, prompts: list[Prompt]) -> None:
        try:
            write_shard(self.sampling.folder, prompts)
            keep_within(self.sampling.folder, self.sampling.limit)
            self._failed = False
        except OSError as error:
            if not self._failed:  # one warning until it works again
                logger.warning("%s: sampled prompts are lost: %s", self.sampling.folder, error)
            self._failed = True
