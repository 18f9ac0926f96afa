"""The pair's target: next-token training, then sharpening."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from research.bundled_pair import corpus
from research.bundled_pair.corpus_rows import Rows
from research.bundled_pair.optimisation import DECAY, Report, build, train
from research.bundled_pair.settings import Settings
from specdec_core.training.optimiser import Optimiser


def train_target(
    settings: Settings, work: Path, tokenizer: PreTrainedTokenizerFast, report: Report
) -> None:
    """Next-token training on the seen modules, into `work`/target.pt."""
    if (work / "target.pt").exists():
        return
    torch.manual_seed(settings.seed)
    model = build(settings.target, settings, tokenizer.eos_token_id)
    documents = corpus.encode_documents(tokenizer, corpus.texts("seen", settings.modules))
    rows = Rows(documents, settings.row_tokens + 1, settings.seed)

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1], use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    train(
        "target",
        model,
        Optimiser(model, settings.matrix_rate, settings.other_rate, DECAY),
        loss,
        _CorpusBatches(rows, settings),
        settings,
        settings.target_minutes,
        work,
        report,
        rows_per_epoch=rows.per_epoch,
        corpus_tokens=sum(map(len, documents)),
    )


@dataclass(frozen=True)
class _CorpusBatches:
    rows: Rows
    settings: Settings

    def __len__(self) -> int:
        settings = self.settings
        return math.ceil(settings.target_tokens / (settings.rows * settings.row_tokens))

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        settings = self.settings
        tokens = self.rows.batch(numbers[0], settings.rows)
        return {"tokens": tokens, "count": settings.rows * settings.row_tokens}


def sharpen(settings: Settings, work: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The trained target with all logits multiplied by `settings.sharpness`.

    The scale is in the final norm's weight, so it costs nothing at run time. Base models of this
    size are unsure everywhere; the models that people speculate with have been sharpened by
    post-training. A draft distilled from a sharp teacher spends its capacity on the argmax, and
    its confidence becomes the probability that the target agrees.
    """
    model = build(settings.target, settings, tokenizer.eos_token_id)
    model.load_state_dict(torch.load(work / "target.pt", weights_only=True)["model"])
    with torch.no_grad():
        model.model.norm.weight.mul_(settings.sharpness)
        # The teacher is the model that is shipped, rounding included.
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.eval()
    return model
