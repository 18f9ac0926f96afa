"""The exported pair, measured as it ships."""

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from research.bundled_pair import corpus
from research.bundled_pair.alignment import Trajectory, greedy_trajectories, measure_alignment
from research.bundled_pair.corpus_rows import Rows
from research.bundled_pair.optimisation import Report
from research.bundled_pair.settings import Settings
from specdec_core.models.loading import load_weights
from specdec_core.prompts import stdlib

OPENING = 32
"""Alignment is also measured on this many generated tokens alone: the part before a small model
begins to repeat itself is the harder one."""


def evaluate(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, out: Path, report: Report
) -> dict[str, Any]:
    """Held-out loss, and alignment by prompt split, of the models in `out`.

    Alignment is in float32 over the bundled prompts' greedy trajectories.
    """
    models = {
        name: load_weights(str(out / "weights" / name), torch.float32)
        for name in ("target", *settings.drafts)
    }
    results = _held_out_losses(settings, tokenizer, models) | {"alignment": {}}
    for done, split in enumerate(stdlib.SPLITS, start=1):
        prompts, _ = stdlib.resolve_prompts(split, tokenizer, out / "prompts.json")
        ids = [tokenizer(text)["input_ids"] for _, text in prompts]
        whole = greedy_trajectories(models["target"], ids, settings.new_tokens)
        openings = [
            Trajectory(t.tokens[: t.prompt_length + OPENING], t.prompt_length) for t in whole
        ]
        for key, trajectories in ((split, whole), (f"{split}_first_{OPENING}", openings)):
            results["alignment"][key] = {
                name: asdict(measure_alignment(models["target"], models[name], trajectories))
                for name in settings.drafts
            }
        report("evaluate", done / len(stdlib.SPLITS), {})
    return results


def _held_out_losses(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, models: dict[str, Any]
) -> dict[str, Any]:
    documents = corpus.encode_documents(tokenizer, corpus.texts("held_out", settings.modules))
    count = min(96, sum(map(len, documents)) // settings.row_tokens)
    rows = Rows(documents, settings.row_tokens, settings.seed).batch(0, count)
    losses = {name: corpus_loss(model, rows) for name, model in models.items()}
    soft = copy.deepcopy(models["target"])
    with torch.no_grad():
        soft.model.norm.weight.div_(settings.sharpness)
    losses["target before sharpening"] = corpus_loss(soft, rows)
    return {"held_out_tokens": rows.numel(), "held_out_loss": losses}


@torch.inference_mode()
def corpus_loss(model: Any, rows: torch.Tensor) -> float:
    """Mean next-token loss in nats over rows [n, length] of token ids."""
    total = 0.0
    for row in rows:
        logits = model(row[None, :-1], use_cache=False).logits[0].float()
        total += F.cross_entropy(logits, row[1:]).item()
    return total / len(rows)
