"""What the drafts learn from: rows of text with the sharpened target's next-token distributions."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from research.bundled_pair import corpus
from research.bundled_pair.corpus_rows import Rows, definition_prefixes
from research.bundled_pair.optimisation import Report, build, save
from research.bundled_pair.settings import Settings


@dataclass
class LabelledRows:
    """Rows of text and the teacher's next-token distributions, of its `kept` best tokens only.

    A sharp teacher puts nearly all probability on them. Stored, they spare its forward each time
    that a draft goes over the rows. `tokens` [rows, length]; `choices` [rows, length, kept], ids,
    best first; `shares` [rows, length, kept], their probabilities, summing to 1.
    """

    tokens: torch.Tensor
    choices: torch.Tensor
    shares: torch.Tensor

    def save(self, path: Path) -> None:
        half = {"choices": self.choices.short(), "shares": self.shares.half()}
        save(path, {"tokens": self.tokens.short(), **half})

    @classmethod
    def load(cls, paths: list[Path]) -> "LabelledRows":
        chunks = [torch.load(path, weights_only=True) for path in paths]
        return cls(**{key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]})

    def rows(self, indices: torch.Tensor) -> "LabelledRows":
        choices, shares = self.choices[indices].long(), self.shares[indices].float()
        return LabelledRows(self.tokens[indices].long(), choices, shares)

    def followed_by(self, other: "LabelledRows") -> "LabelledRows":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return LabelledRows(*(torch.cat(pair) for pair in pairs))


def best_tokens(
    model: LlamaForCausalLM, hidden: torch.Tensor, kept: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and the `kept` best tokens' ids and probabilities, from final hidden states.

    The output layer runs in float32: sharpened logits are large, and bfloat16 would round their
    differences away.
    """
    logits = F.linear(hidden.float(), model.lm_head.weight.float())
    best, choices = logits.topk(kept, dim=-1)
    return logits, choices, best.softmax(-1)


@torch.no_grad()
def label_rows(model: LlamaForCausalLM, tokens: torch.Tensor, kept: int) -> LabelledRows:
    """The teacher's distributions over given rows [rows, length]."""
    choices, shares = [], []
    for batch in tokens.split(8):
        hidden = model.model(batch, use_cache=False).last_hidden_state
        _, ids, probabilities = best_tokens(model, hidden, kept)
        choices.append(ids)
        shares.append(probabilities)
    return LabelledRows(tokens, torch.cat(choices), torch.cat(shares))


@torch.no_grad()
def continue_rows(
    model: LlamaForCausalLM, prefix: torch.Tensor, length: int, greedy_rows: int, kept: int
) -> LabelledRows:
    """Prefixes [rows, n] continued to [rows, length]: the first rows greedily, the rest sampled.

    The teacher's distributions come out of the same forwards.
    """
    rows, given = prefix.shape
    tokens = torch.empty(rows, length, dtype=torch.long)
    tokens[:, :given] = prefix
    choices = torch.empty(rows, length, kept, dtype=torch.long)
    shares = torch.empty(rows, length, kept)
    cache = DynamicCache(config=model.config)
    done = 0
    while done < length:
        step = slice(done, max(given, done + 1))
        hidden = model.model(tokens[:, step], past_key_values=cache).last_hidden_state
        logits, choices[:, step], shares[:, step] = best_tokens(model, hidden, kept)
        done = step.stop
        if done < length:
            last = logits[:, -1]
            # Gumbel-max: an exact draw at temperature 1.
            last[greedy_rows:] -= torch.empty_like(last[greedy_rows:]).exponential_().log()
            tokens[:, done] = last.argmax(-1)
    return LabelledRows(tokens, choices, shares)


class TeacherText:
    """The text that the drafts learn from, in chunks of a file each.

    Corpus text is rows of the seen modules. Own text is what the teacher writes after prefixes of
    them: every other prefix ends with a definition, as prompts do, the rest anywhere. Chunks that
    are there already are not made again.
    """

    def __init__(
        self,
        settings: Settings,
        work: Path,
        tokenizer: PreTrainedTokenizerFast,
        target: LlamaForCausalLM,
    ) -> None:
        self.settings, self.work = settings, work
        length = settings.text_row_tokens
        documents = corpus.encode_documents(tokenizer, corpus.texts("seen", settings.modules))
        self.prefix_rows = Rows(documents, length, settings.seed + 1)
        self.corpus_rows = Rows(documents, length, settings.seed + 3)
        self.definitions = definition_prefixes(settings, tokenizer)
        self.teacher = build(settings.target, settings, tokenizer.eos_token_id).bfloat16().eval()
        self.teacher.load_state_dict(target.state_dict())

    def corpus_text(self, number: int) -> LabelledRows:
        """Chunk `number` of corpus text."""
        rows = self.corpus_rows.batch(number, self.settings.text_rows)
        return label_rows(self.teacher, rows, self.settings.text_kept)

    def own_text(self, number: int) -> LabelledRows:
        """Chunk `number` of own text."""
        settings = self.settings
        length, size = settings.text_row_tokens, settings.text_rows
        generator = torch.Generator().manual_seed(settings.seed * 7919 + number)
        torch.manual_seed(settings.seed * 7919 + number)
        given = int(torch.randint(length // 10, length // 2, (1,), generator=generator))
        prefix = self.prefix_rows.batch(number, size)[:, :given].clone()
        fitting = [ids for ids in self.definitions if len(ids) >= given]
        for row in range(0, size if fitting else 0, 2):
            index = int(torch.randint(len(fitting), (1,), generator=generator))
            prefix[row] = torch.tensor(fitting[index][-given:])
        greedy = round(size * settings.text_greedy)
        return continue_rows(self.teacher, prefix, length, greedy, settings.text_kept)

    def load(self, report: Report) -> tuple[LabelledRows, LabelledRows]:
        """Own text and corpus text; makes the chunks that are missing."""
        settings = self.settings
        size = settings.text_rows * settings.text_row_tokens
        texts = []
        for phase, file, make, tokens in (
            ("read", "read", self.corpus_text, settings.corpus_text_tokens),
            ("write", "own", self.own_text, settings.own_text_tokens),
        ):
            count = math.ceil(tokens / size)
            paths = [self.work / f"{file}-{number:04d}.pt" for number in range(count)]
            for number, path in enumerate(paths):
                if not path.exists():
                    make(number).save(path)
                report(phase, (number + 1) / count, {"tokens": (number + 1) * size})
            texts.append(LabelledRows.load(paths))
        corpus, own = texts
        return own, corpus
