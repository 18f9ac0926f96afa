"""Training examples of heads, from recordings of a pair.

SpecDec++'s head learns from the recording's token-mixed sequences (§4.4), the decision models from
the draft's pass over the target's trajectory. Prompts, not tokens, are split into train, dev and
test (App. D.1), by a hash of their tokens: the same prompt is on the same side in every recording,
and with it all turns of the conversation that it begins.
What is chosen (epoch, learning rate, threshold) is chosen on dev, and reported on test.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.modules import HeadKind, join_features
from specdec_core.recordings.schema import Recording, Trace

HELD_OUT = 0.1  # share of the prompts in dev, and share of the prompts in test
TRAIN, DEV, TEST = range(3)
# Prompts, features and labels of rows; as parts of examples, features, labels and `split`.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Examples:
    """Rows of features (n, f) float32 and labels (n,) float32: acceptance probabilities, or 0 or 1
    where only the outcome is known. `split` (n,) is TRAIN, DEV or TEST."""

    kind: HeadKind
    features: np.ndarray
    labels: np.ndarray
    split: np.ndarray
    draft: str
    hidden_size: int
    top_k: int
    pair: dict[str, str]
    sampling: Sampling
    recordings: tuple[str, ...]


def load_examples(
    recordings: Sequence[Recording],
    draft: str,
    kinds: Sequence[HeadKind],
) -> dict[HeadKind, Examples]:
    """The examples of each kind from recordings of one pair.

    Raises:
        UserError: recordings of different pairs, models or sampling; no such draft; a recording
            without mixed examples; too few prompts for a split into three.
    """
    if not recordings:
        raise UserError("no recording to train on")
    _check(recordings, draft)
    sampling = recordings[0].header.sampling
    parts: dict[HeadKind, list[Rows]] = {kind: [] for kind in kinds}
    for recording in recordings:
        trace = recording.trace(draft)
        split = split_prompts(trace.prompts.first_turns)
        hidden_size = trace.hidden.shape[1]
        for kind in parts:  # each once, though several heads may be of a kind
            if kind != "specdecpp":
                prompts, features, labels = _decisions(kind, trace, sampling)
            else:
                prompts, features, labels = _mixed(recording.examples(draft))
            parts[kind].append((features, labels, split[prompts]))
    return {
        kind: _joined(kind, rows, recordings, draft, hidden_size) for kind, rows in parts.items()
    }


def split_prompts(prompt_tokens: Sequence[np.ndarray]) -> np.ndarray:
    """TRAIN, DEV or TEST for each prompt (n,) int8."""
    places = hash_places(prompt_tokens)
    split = np.where(places < HELD_OUT, DEV, np.where(places < 2 * HELD_OUT, TEST, TRAIN))
    return np.asarray(split, np.int8)


def held_out_prompts(prompt_tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Which prompts (n,) are in dev."""
    return hash_places(prompt_tokens) < HELD_OUT


def hash_places(prompt_tokens: Sequence[np.ndarray]) -> np.ndarray:
    """A number in [0, 1) for each prompt (n,), by a hash of its tokens."""
    keys = [hashlib.sha256(np.asarray(t, np.int64).tobytes()).digest() for t in prompt_tokens]
    return np.array([int.from_bytes(key[:8]) / 2**64 for key in keys], dtype=float)


def same_models(recording: Recording, first: Recording, draft: str | None = None) -> None:
    """Raises :class:`UserError` unless both are of one target and, if given, of one `draft`."""
    if draft is not None:
        recording.draft_name(draft)
    for what in ("target", *([] if draft is None else [draft])):
        if recording.header.fingerprints[what] != first.header.fingerprints.get(what):
            raise UserError(f"{recording.folder} and {first.folder}: other {what} weights")


def _check(recordings: Sequence[Recording], draft: str) -> None:
    first = recordings[0]
    for recording in recordings:
        same_models(recording, first, draft)
        if recording.header.sampling != first.header.sampling:
            raise UserError(f"{recording.folder} and {first.folder}: other sampling")


def _joined(
    kind: HeadKind,
    parts: Sequence[Rows],
    recordings: Sequence[Recording],
    draft: str,
    hidden_size: int,
) -> Examples:
    features, labels, split = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    header = recordings[0].header
    if len(np.unique(split)) < 3:
        raise UserError(
            f"{recordings[0].folder}: too few prompts to train on some, choose on others and report"
            " on the rest"
        )
    return Examples(
        kind=kind,
        features=np.ascontiguousarray(features, dtype=np.float32),
        labels=labels,
        split=split,
        draft=draft,
        hidden_size=hidden_size,
        top_k=header.top_k,
        pair={"target": header.fingerprints["target"], "draft": header.fingerprints[draft]},
        sampling=header.sampling,
        recordings=tuple(each.digest for each in recordings),
    )


def _mixed(table: pa.Table) -> Rows:
    """Token-mixed examples; only tokens that came from the draft count (§4.4)."""
    from_draft = table["from_draft"].to_numpy()
    labels = table["acceptance"].to_numpy()
    hidden = table["hidden"].combine_chunks()
    features = hidden.flatten().to_numpy().reshape(len(table), hidden.type.list_size)
    return (
        table["prompt"].to_numpy()[from_draft],
        features[from_draft],
        labels[from_draft].astype(np.float32),
    )


def _decisions(kind: HeadKind, trace: Trace, sampling: Sampling) -> Rows:
    """What T1, T2 and their joint model read where the draft follows the target's trajectory."""
    rows = trace.drafted
    labels = acceptance(trace, rows, sampling)
    if kind == "t2":
        # T2's label is the result of a verification (§3.3), drawn here where it is not recorded.
        labels = (np.random.default_rng(0).random(len(labels)) < labels).astype(np.float32)
    read = trace.hidden[rows], trace.top_probs[rows], trace.entropy[rows]
    features = join_features(kind, *map(torch.from_numpy, read)).numpy()
    return trace.prompt[rows], features, labels


def acceptance(trace: Trace, rows: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Acceptance probabilities (n,) float32 of the draft's tokens at trajectory rows (n,): under
    rejection sampling min(1, p/q), else 1 where they are the target's."""
    if sampling.fixed_output:
        return np.asarray(trace.draft_token[rows] == trace.target_token[rows], np.float32)
    ratio = trace.draft_token_target_probability[rows] / trace.probability[rows]
    return np.asarray(np.minimum(ratio, 1), np.float32)


def training_digest(spec: HeadSpec, examples: Examples, settings: HeadTrainingSettings) -> str:
    """Names a training: the same digest gives the same head."""
    content = {
        "spec": spec.model_dump(),
        "settings": settings.model_dump(),
        "recordings": examples.recordings,
        "held_out": {"dev": HELD_OUT, "test": HELD_OUT},
        "pair": examples.pair,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
