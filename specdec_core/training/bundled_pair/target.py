"""The pair's target: next-token training, then sharpening."""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_core.prompts import stdlib
from specdec_core.training.bundled_pair.corpus_rows import Rows
from specdec_core.training.bundled_pair.optimisation import (
    Batch,
    Optimiser,
    Report,
    Training,
    build,
)
from specdec_core.training.bundled_pair.settings import Settings


def train_target(
    settings: Settings, work: Path, tokenizer: PreTrainedTokenizerFast, report: Report
) -> None:
    """Next-token training on the seen modules, into `work`/target.pt."""
    if (work / "target.pt").exists():
        return
    torch.manual_seed(settings.seed)
    model = build(settings.target, settings, tokenizer.eos_token_id)
    documents = stdlib.encode_documents(tokenizer, stdlib.texts("seen", settings.modules))
    rows = Rows(documents, settings.row_tokens + 1, settings.seed)

    def forward(number: int) -> Batch:
        batch = rows.batch(number, settings.rows)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        labels = batch[:, 1:].flatten()
        return F.cross_entropy(logits.float().flatten(0, 1), labels), {}, len(labels)

    training = Training(
        "target",
        model,
        Optimiser(model, settings.matrix_rate, settings.other_rate),
        work,
        tokens=settings.target_tokens,
        minutes=settings.target_minutes,
        checkpoint_seconds=settings.checkpoint_seconds,
    )
    training.run(forward, report)
    training.finish(
        training_loss=training.means["loss"],
        epochs=training.batches * settings.rows / rows.per_epoch,
        corpus_tokens=sum(map(len, documents)),
    )


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
