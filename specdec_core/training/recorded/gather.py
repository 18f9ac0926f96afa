"""What trainings read, made where it is missing: a target's answers, and its features of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import PairSpec
from specdec_core.models.eagle.settings import default_layers
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.loading import load_skeleton
from specdec_core.models.pair import load_pair
from specdec_core.prompts.chat import AUTO
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.training.recorded.answers import (
    SHARD,
    AnswersCard,
    TokenPrompt,
    answer_shards,
    claim,
    write_answers,
)
from specdec_core.training.recorded.features import check_folder, missing_bytes, record_features
from specdec_core.training.recorded.loss import working_type


def token_prompts(
    source: str, tokenizer: Any, limit: int | None, longest: int, chat_template: str = AUTO
) -> list[TokenPrompt]:
    """The first `limit` prompts of a source as tokens: the first turn of each conversation, without
    prompts of more than `longest` tokens. They are shuffled by a fixed seed, so that the first
    answers are typical. Raises :class:`UserError` for a bad source, and where no prompt is
    left."""
    prompts = load_prompts(source, limit, tokenizer, chat_template)
    found = [(prompt.id, Conversation(prompt, tokenizer).tokens()) for prompt in prompts]
    random.Random(0).shuffle(found)
    kept = [(name, tokens) for name, tokens in found if 0 < len(tokens) <= longest]
    if not kept:
        raise UserError(f"{source}: no prompts of at most {longest} tokens in it")
    return kept


def gather_answers(
    spec: PairSpec,
    prompts: Sequence[TokenPrompt],
    folder: Path,
    new_tokens: int,
    temperatures: tuple[float, ...],
    slots: int,
    observer: Observer,
) -> None:
    """Have the target answer the prompts that it has not answered.

    Raises:
        UserError: the folder holds other answers, or a prompt does not fit.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr(prompt).encode())
    card = AnswersCard(
        target=spec.target,
        fingerprint=fingerprint(spec.target),
        prompts=len(prompts),
        digest=digest.hexdigest(),
        max_new_tokens=new_tokens,
        temperatures=temperatures,
    )
    claim(folder, card)
    done = min(len(answer_shards(folder)) * SHARD, len(prompts))
    observer.stage("answering prompts", len(prompts), done=done)
    if done < len(prompts):
        write_answers(load_pair(spec), prompts, card, folder, slots, lambda _: observer.step())


def gather_features(
    spec: PairSpec,
    layers: tuple[int, ...] | None,
    answers: Path,
    out: Path,
    observer: Observer,
    say: Callable[[str], None],
) -> Path:
    """Record the target's features of the answers in a folder that have none yet, after saying how
    much room they take; returns the features' folder, in `out`. With no `layers` only what the
    output layer reads is recorded; None is for the three that heads read by default.

    Raises:
        UserError: the answers are another target's, or `out` holds features of other answers.
    """
    config = load_skeleton(spec.target).config.get_text_config(decoder=True)
    layers = default_layers(config.num_hidden_layers) if layers is None else layers
    folder = out / "features" / ("-".join(map(str, layers)) or "output")
    check_folder(folder, answers, fingerprint(spec.target), layers)
    if room := missing_bytes(answers, folder, len(layers), config.hidden_size):
        say(f"features will take {room / 1e9:.2f} GB in {folder}")
        # A forward of many tokens is quickest with weights as they are.
        narrow = str(working_type()).removeprefix("torch.")
        runner = spec.runner.model_copy(update={"pack": False, "target_dtype": narrow})
        pair = load_pair(spec.model_copy(update={"runner": runner}))
        record_features(pair, layers, answers, folder, observer)
    return folder
