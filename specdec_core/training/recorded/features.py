"""What a target computes of its answers, recorded once for all trainings.

A shard of answers gives a shard of features. The same call, interrupted, resumes after the last
complete one. The target's own tables are stored beside them, so that training needs no target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path, write_atomically
from specdec_core.base.observer import Observer
from specdec_core.config import Document, parse_json
from specdec_core.models.features import LayerInputs, decoder_layers
from specdec_core.models.fingerprints import TARGET, fingerprint
from specdec_core.models.pair import Pair
from specdec_core.training.heads.examples import held_out_prompts
from specdec_core.training.recorded.answers import (
    RecordedAnswer,
    answer_shards,
    read_card,
    read_shard,
)

TABLES = "target.safetensors"
_CARD = "features.json"
_TEXTS = 8  # a forward
_CHUNK = 256  # rows of the target's output layer
_TYPE = torch.bfloat16


class FeaturesCard(Document):
    """What the shards in a folder hold: inputs of the target's `layers`, of its answers in
    `answers`."""

    answers: str
    target: str
    fingerprint: str
    layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    config: dict[str, Any]  # the target's
    identity: str  # of the answers' card


def missing_bytes(answers: Path, folder: Path, layers: int, width: int) -> int:
    """The bytes that the features of answers will take that are not in `folder` yet."""
    rows = 0
    for shard in _missing(answers, folder):
        for text in read_shard(answers, shard):
            rows += layers * (len(text.prompt) + len(text.answer)) + len(text.answer)
    return rows * width * _TYPE.itemsize


@torch.inference_mode()
def record_features(
    pair: Pair,
    layers: Sequence[int],
    answers: Path,
    folder: Path,
    observer: Observer | None = None,
) -> None:
    """Record the features of the answers that are not in `folder` yet; `observer` follows the
    shards. The pair's target is on the CPU, its weights not packed.

    Raises:
        UserError: see :func:`check_folder`; or the target's output layer is more than a matrix.
    """
    observer = observer or Observer()
    fingerprint, target = pair.fingerprints[TARGET], pair.target
    check_folder(folder, answers, fingerprint, layers)
    card = FeaturesCard(
        answers=str(answers),
        target=pair.spec.target,
        fingerprint=fingerprint,
        layers=tuple(layers),
        eos_token_ids=tuple(sorted(pair.eos_token_ids)),
        config=target.config.get_text_config(decoder=True).to_dict(),
        identity=read_card(answers).identity,
    )
    if not (folder / _CARD).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / TABLES) as path:
            save_file(_tables(target), path)
        write_atomically(folder / _CARD, card.model_dump_json(indent=1))
    shards, missing = answer_shards(answers), _missing(answers, folder)
    observer.stage("reading answers", len(shards), done=len(shards) - len(missing))
    reader = _Reader(target, layers)
    try:
        for shard in missing:
            with atomic_path(_path(folder, shard)) as path:
                save_file(reader.read(read_shard(answers, shard)), path)
            observer.step()
    finally:
        reader.inputs.remove()


def check_folder(folder: Path, answers: Path, fingerprint: str, layers: Sequence[int]) -> None:
    """Raises :class:`UserError` unless the answers are of the target with that fingerprint, and
    `folder` is empty or for the inputs of its `layers` at these very answers."""
    card = read_card(answers)
    if card.fingerprint != fingerprint:
        raise UserError(
            f"{answers}: the answers of another target (weights {card.fingerprint}, not"
            f" {fingerprint}); name another --answers"
        )
    if not (folder / _CARD).exists():
        return
    found = read_features_card(folder)
    if (found.fingerprint, found.layers) != (fingerprint, tuple(layers)):
        raise UserError(f"{folder}: holds other features ({_CARD} differs); name another --out")
    if found.identity != card.identity:
        raise UserError(
            f"{folder}: holds the features of other answers than those in {answers}; name another"
            " --out"
        )


def read_features_card(folder: Path) -> FeaturesCard:
    """What is in a folder of features. Raises :class:`UserError` where there is none."""
    path = folder / _CARD
    if not path.exists():
        raise UserError(f"{path}: no such file")
    return parse_json(FeaturesCard, path.read_text(), str(path))


def check_features(folder: Path, target: str) -> None:
    """Raises :class:`UserError` unless the features in a folder are of the target of that name."""
    found, expected = read_features_card(folder).fingerprint, fingerprint(target)
    if found != expected:
        raise UserError(
            f"{folder}: the features of another target (weights {found}, those of {target} are"
            f" {expected})"
        )


def read_tables(folder: Path) -> dict[str, Tensor]:
    """The target's `embed_tokens` and `output`, (vocabulary, width) each, its final `norm`, if it
    is called so, and the weights of its last `layer.…`."""
    return load_file(folder / TABLES)


def _tables(target: PreTrainedModel) -> dict[str, Tensor]:
    embed: Any = target.get_input_embeddings()
    output: Any = target.get_output_embeddings()
    tables = {
        "embed_tokens": embed(torch.arange(embed.num_embeddings)),
        "output": output.weight,
    }
    if (norm := getattr(target.base_model, "norm", None)) is not None:
        tables["norm"] = norm.weight
    last = decoder_layers(target)[-1]
    tables |= {f"layer.{name}": weight for name, weight in last.state_dict().items()}
    return {name: table.detach().to(_TYPE).clone() for name, table in tables.items()}


class _Reader:
    """Runs a target over answers."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self.target, self.count = target, len(layers)
        self.inputs = LayerInputs(target, [*layers, len(decoder_layers(target))])
        self.output = target.get_output_embeddings()
        self._check()

    def read(self, answers: Sequence[RecordedAnswer]) -> dict[str, Tensor]:
        """The tensors of a shard, text after text."""
        texts = [[*answer.prompt, *answer.answer] for answer in answers]
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        features: dict[int, Tensor] = {}
        last: dict[int, Tensor] = {}
        for first in range(0, len(order), _TEXTS):
            numbers = order[first : first + _TEXTS]
            tokens = _padded([torch.tensor(texts[number]) for number in numbers])
            # Padding on the right is behind all that is read, and needs no mask.
            self.target.base_model(input_ids=tokens, use_cache=False)
            read = self.inputs.take().to(_TYPE)
            split = self.count * read.shape[-1] // (self.count + 1)
            for number, row in zip(numbers, read, strict=True):
                whole, prompt = len(texts[number]) - 1, len(answers[number].prompt)
                features[number] = row[:whole, :split].clone()
                last[number] = row[prompt:whole, split:].clone()
        rows = torch.cat([last[number] for number in range(len(texts))])
        normaliser, best = self._summarise(rows)
        return {
            "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            "prompts": torch.tensor([len(answer.prompt) for answer in answers]),
            "answers": torch.tensor([len(answer.answer) for answer in answers]),
            "temperatures": torch.tensor([answer.temperature for answer in answers]),
            "features": torch.cat([features[number] for number in range(len(texts))]),
            "last": rows,
            "normaliser": normaliser,
            "best": best.int(),
        }

    def _summarise(self, last: Tensor) -> tuple[Tensor, Tensor]:
        logits = (self.output(rows.to(self.target.dtype)).float() for rows in last.split(_CHUNK))
        parts = [(some.logsumexp(-1), some.argmax(-1)) for some in logits]
        normaliser, best = zip(*parts, strict=True)
        return torch.cat(normaliser), torch.cat(best)

    def _check(self) -> None:
        """Raises :class:`UserError` unless logits are the product with the output's matrix."""
        logits = self.target(input_ids=torch.tensor([[0, 1]]), use_cache=False).logits
        read = self.inputs.take()
        product = read[..., -self.output.weight.shape[1] :] @ self.output.weight.T
        if not torch.allclose(product.float(), logits.float(), rtol=0.05, atol=0.5):
            kind = self.target.config.model_type
            raise UserError(f"{kind}: its logits are not a product with its output layer's matrix")


@dataclass(frozen=True)
class Text:
    """Where a text is in its shard."""

    shard: int
    token: int  # the first one's row
    feature: int
    last: int
    prompt: int  # tokens
    answer: int
    temperature: float

    @property
    def length(self) -> int:
        """The answer's tokens with a known next token."""
        return self.answer - 1


@dataclass(frozen=True)
class TextBatch:
    """Prompts with their answers, padded on the right.

    The tokens of an answer with a known next token are numbered from 0; text b has `lengths[b]`.

    Attributes:
        tokens: (b, n).
        features: of the tokens but the last (b, n - 1, layers · width); of width 0 where they were
            not asked for.
        prompts: the length of each prompt (b,).
        lengths: of each answer, less one (b,).
        last: what the target's output layer reads after those tokens (b, longest, width).
        normaliser: logsumexp of the target's logits there (b, longest).
        best: the target's most likely next token (b, longest).
        temperatures: at which each answer was decoded (b,).
    """

    tokens: Tensor
    features: Tensor
    prompts: Tensor
    lengths: Tensor
    last: Tensor
    normaliser: Tensor
    best: Tensor
    temperatures: Tensor

    @property
    def chains(self) -> int:
        """The most chains of a text: one for each token with a known next token."""
        return self.last.shape[1]

    @property
    def answered(self) -> Tensor:
        """Which of (b, longest) are tokens of an answer and no padding."""
        return torch.arange(self.chains) < self.lengths[:, None]


class RecordedTexts:
    """Texts with their features, read from disk batch by batch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.card = folder, read_features_card(folder)
        self.files: dict[int, Any] = {}
        self.texts: list[Text] = []
        held_out: list[np.ndarray] = []
        for path in sorted(folder.glob("[0-9]*.safetensors")):
            self._open(path, held_out)
        self.held_out = np.concatenate([np.zeros(0, bool), *held_out])

    def split(self, judged_at: Collection[float] = ()) -> tuple[list[int], list[int]]:
        """The numbers of the texts to train on and of the held-out texts, by a hash of their
        prompts. Raises :class:`UserError` where either list is empty, or where no held-out text is
        at one of the temperatures `judged_at`, if there are any."""
        usable = [n for n, text in enumerate(self.texts) if text.length > 0]
        train = [n for n in usable if not self.held_out[n]]
        rest = [n for n in usable if self.held_out[n]]
        judged = [n for n in rest if not judged_at or self.texts[n].temperature in judged_at]
        if not train or not judged:
            raise UserError(
                f"{self.card.answers}: too few answers to train on some and evaluate on the others"
            )
        return train, rest

    def answers(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """The answers of these texts as tokens."""
        for number in numbers:
            text = self.texts[number]
            start = text.token + text.prompt
            yield self._rows(text, "tokens", start, text.answer).tolist()

    def batch(self, numbers: Sequence[int], features: bool = True) -> TextBatch:
        """These texts side by side, with or without their features."""
        texts = [self.texts[number] for number in numbers]

        def of_answers(name: str) -> Tensor:
            return _padded([self._rows(t, name, t.last, t.length) for t in texts])

        def read(text: Text) -> Tensor:
            count = text.prompt + text.answer - 1
            if not features:
                return torch.empty(count, 0)
            return self._rows(text, "features", text.feature, count)

        tokens = [self._rows(t, "tokens", t.token, t.prompt + t.answer) for t in texts]
        return TextBatch(
            tokens=_padded(tokens).long(),
            features=_padded([read(text) for text in texts]),
            prompts=torch.tensor([text.prompt for text in texts]),
            lengths=torch.tensor([text.length for text in texts]),
            last=of_answers("last"),
            normaliser=of_answers("normaliser"),
            best=of_answers("best").long(),
            temperatures=torch.tensor([text.temperature for text in texts]),
        )

    def _open(self, path: Path, held_out: list[np.ndarray]) -> None:
        shard = int(path.stem)
        file: Any = safe_open(path, framework="pt")
        self.files[shard] = file
        tokens = file.get_tensor("tokens").numpy()
        columns = [file.get_tensor(n).tolist() for n in ("prompts", "answers", "temperatures")]
        prompts = []
        token = feature = last = 0
        for prompt, answer, temperature in zip(*columns, strict=True):
            self.texts.append(Text(shard, token, feature, last, prompt, answer, temperature))
            prompts.append(tokens[token : token + prompt])
            token += prompt + answer
            feature += prompt + answer - 1
            last += max(answer - 1, 0)
        held_out.append(held_out_prompts(prompts))

    def _rows(self, text: Text, name: str, first: int, count: int) -> Tensor:
        rows: Tensor = self.files[text.shard].get_slice(name)[first : first + count]
        return rows


def _missing(answers: Path, folder: Path) -> list[int]:
    return [shard for shard in answer_shards(answers) if not _path(folder, shard).exists()]


def _path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.safetensors"


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
