"""Recordings for the tests of commands that read them."""

from pathlib import Path

from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import PromptSet, load_prompts
from specdec_core.recordings.find import finish
from specdec_core.recordings.record import record_requests


def record_prompts(
    pair: Pair,
    source: Path,
    folder: Path,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    limit: int | None = None,
) -> None:
    """Leave in `folder` what `specdec record` would, by this process alone."""
    prompts = load_prompts(str(source), limit, pair.tokenizer)
    requests = [
        Request(prompt.id, tuple(pair.tokenizer(prompt.text)["input_ids"]), max_new_tokens, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    described, sampling = PromptSet.of(str(source), prompts), sampling or Sampling()
    record_requests(pair, requests, folder, prompts=described, sampling=sampling, mixing=0)
    finish(folder)
