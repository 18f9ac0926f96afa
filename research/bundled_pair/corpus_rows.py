"""The pair's tokenizer, and rows of tokens cut from the standard library's modules."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from research.bundled_pair import corpus
from research.bundled_pair.settings import Settings
from specdec_core.base.files import atomic_folder
from specdec_core.models.loading import load_tokenizer
from specdec_core.prompts import stdlib


def train_tokenizer(settings: Settings, work: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `settings.vocabulary` tokens, learnt on the seen modules alone."""
    folder = work / "tokenizer"
    if not folder.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=settings.vocabulary,
            special_tokens=[corpus.END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(corpus.texts("seen", settings.modules), trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            bos_token=corpus.END_OF_TEXT,
            eos_token=corpus.END_OF_TEXT,
            pad_token=corpus.END_OF_TEXT,
            model_max_length=settings.context,
            clean_up_tokenization_spaces=False,
        )
        with atomic_folder(folder) as new:
            tokenizer.save_pretrained(new)
    trained = load_tokenizer(str(folder))
    assert isinstance(trained, PreTrainedTokenizerFast)
    return trained


class Rows:
    """An endless, resumable stream of rows of tokens.

    Each epoch concatenates the documents in a new random order and cuts them into rows of `length`
    tokens from a new random offset. Batch n is always the same.
    """

    def __init__(self, documents: list[list[int]], length: int, seed: int) -> None:
        self.documents = [torch.tensor(document) for document in documents]
        self.length = length
        self.seed = seed
        self.per_epoch = sum(map(len, documents)) // length
        if not self.per_epoch:
            raise ValueError(f"the corpus is shorter than one row of {length} tokens")
        self._epoch = (-1, torch.empty(0, length, dtype=torch.long))

    def _rows_of(self, epoch: int) -> torch.Tensor:
        if self._epoch[0] != epoch:
            generator = epoch_generator(self.seed, epoch)
            order = torch.randperm(len(self.documents), generator=generator).tolist()
            stream = torch.cat([self.documents[index] for index in order])
            stream = stream.roll(int(torch.randint(self.length, (1,), generator=generator)))
            rows = stream[: self.per_epoch * self.length].view(-1, self.length)
            self._epoch = (epoch, rows[torch.randperm(len(rows), generator=generator)])
        return self._epoch[1]

    def batch(self, number: int, size: int) -> torch.Tensor:
        """Rows `number * size` onward: [size, length] token ids."""
        first = number * size
        places = (divmod(index, self.per_epoch) for index in range(first, first + size))
        return torch.stack([self._rows_of(epoch)[row] for epoch, row in places])


def shuffled(count: int, seed: int, first: int, size: int) -> torch.Tensor:
    """Entries `first` to `first + size` of an endless stream of permutations of 0 … count - 1."""
    places = (divmod(index, count) for index in range(first, first + size))
    return torch.stack(
        [
            torch.randperm(count, generator=epoch_generator(seed, epoch))[row]
            for epoch, row in places
        ]
    )


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def definition_prefixes(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Token ids up to each definition's signature in the seen modules: what prompts look like."""
    prefixes = []
    for module in stdlib.modules_of("seen", settings.modules):
        texts = (stdlib.text_up_to_anchor(module, anchor) for anchor in stdlib.anchors(module))
        tails = [text[-2000:] for text in texts]
        if tails:
            prefixes.extend(tokenizer(tails, verbose=False)["input_ids"])
    return prefixes
