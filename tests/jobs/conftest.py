"""Recordings for the tests of commands that read them."""

from pathlib import Path

from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import PromptSet, digest, load_prompts
from specdec_core.recordings.find import finish
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.schema import Header, save_header, write_shard


def record_prompts(
    pair: Pair, source: Path, folder: Path, max_new_tokens: int, sampling: Sampling | None = None
) -> None:
    """Leave in `folder` what `specdec record` would, by this process alone."""
    prompts = load_prompts(str(source), None, pair.tokenizer)
    header = Header(
        pair=pair.spec,
        fingerprints=pair.fingerprints,
        eos_token_ids=tuple(pair.eos_token_ids),
        prompts=PromptSet(source=str(source), count=len(prompts), digest=digest(prompts)),
        sampling=sampling or Sampling(),
        max_new_tokens=max_new_tokens,
        mixing=0,
    )
    requests = [
        Request(prompt.id, tuple(pair.tokenizer(prompt.text)["input_ids"]), max_new_tokens, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    save_header(header, folder)
    write_shard(Recorder(pair, header).record(list(enumerate(requests))), folder, 0)
    finish(folder)
