"""What a target computes of its answers, recorded once for all trainings.

Recordings have the answers. The same call, interrupted, resumes after the last complete shard. The
target's own tables are stored beside them, so that training needs no target.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path
from specdec_core.base.observer import Observer
from specdec_core.config import Stored
from specdec_core.models.features import LayerInputs, decoder_layers
from specdec_core.models.fingerprints import TARGET, fingerprint
from specdec_core.models.pair import Pair
from specdec_core.recordings.schema import Recording
from specdec_core.training.heads.examples import held_out_prompts, same_models
from specdec_core.training.recorded.loss import rounded

SHARD = 256  # answers
TABLES = "target.safetensors"
_TEXTS = 8  # a forward
_CHUNK = 256  # rows of the target's output layer
_TYPE = torch.bfloat16


class FeaturesCard(Stored):
    """What the shards in a folder hold: inputs of the target's `layers`, of its answers in
    `recordings`."""

    FILE: ClassVar[str] = "features.json"
    WHAT: ClassVar[str] = "features"

    recordings: tuple[str, ...]
    target: str
    fingerprint: str
    layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    config: dict[str, Any]  # the target's
    identity: str  # of the answers


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and the target's answer at a temperature, as tokens. The held-out ones are not
    trained on."""

    prompt: list[int]
    answer: list[int]
    temperature: float
    held_out: bool


@dataclass(frozen=True)
class RecordedAnswers:
    """The answers in recordings of one target, without prompts of more than `longest` tokens. They
    are shuffled by a fixed seed, so that the first shards are typical.

    Raises :class:`UserError` where no answer is left, a recording is there twice, the recordings
    are of different targets or other weights than the target's here, or tokens were sampled by
    another rule than temperature.
    """

    recordings: Sequence[Recording]
    longest: int

    def __post_init__(self) -> None:
        digests: set[str] = set()
        for recording in self.recordings:
            if recording.digest in digests:
                raise UserError(f"{recording.folder}: the same answers twice")
            digests.add(recording.digest)
            header = recording.header
            same_models(recording, self.recordings[0])
            if header.fingerprints[TARGET] != fingerprint(self.target):
                raise UserError(f"{recording.folder}: the answers of other weights than are here")
            sampling = header.sampling
            if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
                raise UserError(
                    f"{recording.folder}: sampled with top-k, top-p or min-p, which a training does"
                    " not know; record with a temperature alone"
                )

    @property
    def target(self) -> str:
        return self.recordings[0].header.pair.target

    @property
    def identity(self) -> str:
        """The same for the same answers, wherever the recordings are."""
        content = f"{[each.digest for each in self.recordings]} {self.longest}"
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def texts(self) -> list[RecordedAnswer]:
        found: list[RecordedAnswer] = []
        for recording in self.recordings:
            prompts, temperature = recording.prompts, recording.header.sampling.temperature
            columns = prompts.tokens, prompts.outputs, held_out_prompts(prompts.first_turns)
            found += [
                RecordedAnswer(prompt.tolist(), output.tolist(), temperature, bool(held_out))
                for prompt, output, held_out in zip(*columns, strict=True)
                if len(prompt) <= self.longest
            ]
        if not found:
            raise UserError(
                f"{self.recordings[0].folder}: no prompts of at most {self.longest} tokens in it"
            )
        random.Random(0).shuffle(found)
        return found

    def missing(self, folder: Path) -> dict[int, list[RecordedAnswer]]:
        """The shards without features in `folder`, by number."""
        shards = range(-(-len(self.texts) // SHARD))
        return {
            shard: self.texts[shard * SHARD : (shard + 1) * SHARD]
            for shard in shards
            if not _path(folder, shard).exists()
        }


def missing_bytes(answers: RecordedAnswers, folder: Path, layers: int, width: int) -> int:
    """The bytes that the features of answers will take that are not in `folder` yet."""
    rows = 0
    for texts in answers.missing(folder).values():
        for text in texts:
            rows += layers * (len(text.prompt) + len(text.answer)) + len(text.answer)
    return rows * width * _TYPE.itemsize


@torch.inference_mode()
def record_features(
    pair: Pair,
    layers: Sequence[int],
    answers: RecordedAnswers,
    folder: Path,
    observer: Observer | None = None,
) -> None:
    """Record the features of the answers that are not in `folder` yet; `observer` follows the
    shards. The weights of the pair's target are not packed.

    Raises:
        UserError: see :func:`check_folder`; or the target's output layer is more than a matrix.
    """
    observer, target = observer or Observer(), pair.target
    check_folder(folder, answers, layers)
    card = FeaturesCard(
        recordings=tuple(str(each.folder) for each in answers.recordings),
        target=pair.spec.target,
        fingerprint=pair.fingerprints[TARGET],
        layers=tuple(layers),
        eos_token_ids=tuple(sorted(pair.eos_token_ids)),
        config=target.config.get_text_config(decoder=True).to_dict(),
        identity=answers.identity,
    )
    if not (folder / FeaturesCard.FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / TABLES) as path:
            save_file(_tables(target), path)
        card.save(folder)
    missing, shards = answers.missing(folder), -(-len(answers.texts) // SHARD)
    observer.stage("recording features", shards, done=shards - len(missing))
    reader = _Reader(target, layers)
    try:
        for shard, texts in missing.items():
            with atomic_path(_path(folder, shard)) as path:
                save_file(reader.read(texts), path)
            observer.step()
    finally:
        reader.inputs.remove()


def check_folder(folder: Path, answers: RecordedAnswers, layers: Sequence[int]) -> None:
    """Raises :class:`UserError` where `folder` holds the features of other answers, or the inputs
    of other layers than `layers`."""
    if not (folder / FeaturesCard.FILE).exists():
        return
    found = FeaturesCard.load(folder)
    if found.layers != tuple(layers) or found.identity != answers.identity:
        raise UserError(
            f"{folder}: holds the features of other answers or layers; name another --out"
        )


def read_tables(folder: Path) -> dict[str, Tensor]:
    """The target's `embed_tokens` and `output`, (vocabulary, width) each, its final `norm`, if it
    is called so, and the weights of its last `layer.…`."""
    return load_file(folder / TABLES)


def _tables(target: PreTrainedModel) -> dict[str, Tensor]:
    embed: Any = target.get_input_embeddings()
    output: Any = target.get_output_embeddings()
    tables = {
        "embed_tokens": embed(torch.arange(embed.num_embeddings, device=target.device)),
        "output": output.weight,
    }
    norm = getattr(target.base_model, "norm", None)
    if norm is not None and (scale := _scale(norm)) is not None:
        tables["norm"] = scale
    tables |= {f"layer.{name}": value for name, value in _of_layer(decoder_layers(target)[-1])}
    return {name: table.detach().to("cpu", _TYPE, copy=True) for name, table in tables.items()}


def _of_layer(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a layer by their names in a Llama's."""
    norms = {f"{name}.weight": module for name, module in layer.named_modules()}
    renamed = {name: name for name in layer.state_dict()}
    if hasattr(layer, "post_feedforward_layernorm"):  # where a Llama's is, it is not before the MLP
        renamed.pop("post_attention_layernorm.weight", None)
        before = "pre_feedforward_layernorm.weight"
        renamed |= {before: "post_attention_layernorm.weight"} if before in renamed else {}
    for name, weight in layer.state_dict().items():
        if name not in renamed:
            continue
        norm = norms.get(name)
        is_norm = weight.ndim == 1 and norm is not None and "Norm" in type(norm).__name__
        value = _scale(norm) if is_norm and norm is not None else weight
        if value is not None:
            yield renamed[name], value


def _scale(norm: nn.Module) -> Tensor | None:
    """What a norm multiplies a normalised state by: its weight w, or 1 + w (Gemma). None for one
    that does more."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    scale = norm(torch.ones_like(weight))  # of the ones, one that subtracts the mean leaves nothing
    found = (each for each in (weight, 1 + weight) if torch.allclose(scale, each, 0.01, 0.01))
    return next(found, None) if getattr(norm, "bias", None) is None else None


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
        rows: dict[int, tuple[Tensor, Tensor]] = {}  # features, and what the output layer reads
        for first in range(0, len(order), _TEXTS):
            numbers = order[first : first + _TEXTS]
            padded = pad_sequence([torch.tensor(texts[n]) for n in numbers], batch_first=True)
            tokens = padded.to(self.target.device)
            # Padding on the right is behind all that is read, and needs no mask.
            self.target.base_model(input_ids=tokens, use_cache=False)
            read = self.inputs.take().to("cpu", _TYPE)
            split = self.count * read.shape[-1] // (self.count + 1)
            for number, row in zip(numbers, read, strict=True):
                whole, prompt = len(texts[number]) - 1, len(answers[number].prompt)
                rows[number] = row[:whole, :split].clone(), row[prompt:whole, split:].clone()
        parts = zip(*(rows[number] for number in range(len(texts))), strict=True)
        features, last = (torch.cat(part) for part in parts)
        normaliser, best = self._summarise(last)
        return {
            "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            "prompts": torch.tensor([len(answer.prompt) for answer in answers]),
            "answers": torch.tensor([len(answer.answer) for answer in answers]),
            "temperatures": torch.tensor([answer.temperature for answer in answers]),
            "held_out": torch.tensor([answer.held_out for answer in answers]),
            "features": features,
            "last": last,
            "normaliser": normaliser,
            "best": best.int(),
        }

    def _summarise(self, last: Tensor) -> tuple[Tensor, Tensor]:
        target = self.target
        given = (rows.to(target.device, target.dtype) for rows in last.split(_CHUNK))
        logits = (self.output(rows).float() for rows in given)
        found = [(some.logsumexp(-1).cpu(), some.argmax(-1).cpu()) for some in logits]
        normaliser, best = zip(*found, strict=True)
        return torch.cat(normaliser), torch.cat(best)

    def _check(self) -> None:
        """Raises :class:`UserError` unless logits are the product with the output's matrix."""
        tokens = torch.tensor([[0, 1]], device=self.target.device)
        logits = self.target(input_ids=tokens, use_cache=False).logits
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
    held_out: bool

    @property
    def length(self) -> int:
        """The answer's tokens with a known next token."""
        return self.answer - 1


@dataclass(frozen=True)
class TextBatch:
    """Prompts with their answers, padded on the right to lengths that are :func:`rounded`.

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
        numbers = torch.arange(self.chains, device=self.lengths.device)
        return numbers < self.lengths[:, None]

    def to(self, device: torch.device) -> TextBatch:
        """The same on a device."""
        return TextBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


class RecordedTexts:
    """Texts with their features, read from disk batch by batch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.card = folder, FeaturesCard.load(folder)
        self.files: dict[int, Any] = {}
        self.texts: list[Text] = []
        for path in sorted(folder.glob("[0-9]*.safetensors")):
            self._open(path)

    def split(self, judged_at: Collection[float] = ()) -> tuple[list[int], list[int]]:
        """The numbers of the texts to train on, and of the held-out texts at one of the
        temperatures `judged_at`; unset, of all held-out texts. Raises :class:`UserError` where
        either list is empty."""
        usable = [n for n, text in enumerate(self.texts) if text.length > 0]
        train = [n for n in usable if not self.texts[n].held_out]
        rest = [n for n in usable if self.texts[n].held_out]
        judged = [n for n in rest if not judged_at or self.texts[n].temperature in judged_at]
        if not train or not judged:
            raise UserError(
                f"{', '.join(self.card.recordings)}: too few answers to train on some and evaluate"
                " on the others"
            )
        return train, judged

    def answers(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """The answers as tokens, by the numbers of their sequences."""
        for number in numbers:
            text = self.texts[number]
            start = text.token + text.prompt
            yield self._rows(text, "tokens", start, text.answer).tolist()

    def batch(self, numbers: Sequence[int], features: bool = True) -> TextBatch:
        """These texts side by side, with or without their features."""
        texts = [self.texts[number] for number in numbers]
        longest = rounded(max(text.length for text in texts))
        read_tokens = rounded(max(text.prompt + text.answer - 1 for text in texts), 64)

        def of_answers(name: str) -> Tensor:
            return _padded([self._rows(t, name, t.last, t.length) for t in texts], longest)

        def read(text: Text) -> Tensor:
            count = text.prompt + text.answer - 1
            if not features:
                return torch.empty(count, 0)
            return self._rows(text, "features", text.feature, count)

        tokens = [self._rows(t, "tokens", t.token, t.prompt + t.answer) for t in texts]
        return TextBatch(
            tokens=_padded(tokens, read_tokens + 1).long(),
            features=_padded([read(text) for text in texts], read_tokens),
            prompts=torch.tensor([text.prompt for text in texts]),
            lengths=torch.tensor([text.length for text in texts]),
            last=of_answers("last"),
            normaliser=of_answers("normaliser"),
            best=of_answers("best").long(),
            temperatures=torch.tensor([text.temperature for text in texts]),
        )

    def _open(self, path: Path) -> None:
        shard = int(path.stem)
        file: Any = safe_open(path, framework="pt")
        self.files[shard] = file
        names = ("prompts", "answers", "temperatures", "held_out")
        token = feature = last = 0
        for prompt, answer, *how in zip(*(file.get_tensor(n).tolist() for n in names), strict=True):
            self.texts.append(Text(shard, token, feature, last, prompt, answer, *how))
            token += prompt + answer
            feature += prompt + answer - 1
            last += max(answer - 1, 0)

    def _rows(self, text: Text, name: str, first: int, count: int) -> Tensor:
        rows: Tensor = self.files[text.shard].get_slice(name)[first : first + count]
        return rows


def _path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.safetensors"


def _padded(rows: list[Tensor], length: int) -> Tensor:
    whole = pad_sequence(rows, batch_first=True)
    return pad(whole, (*[0, 0] * (whole.ndim - 2), 0, length - whole.shape[1]))
