"""The exported pair, measured as it ships."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from research.bundled_pair import corpus
from research.bundled_pair.corpus_rows import Rows
from research.bundled_pair.optimisation import Report
from research.bundled_pair.settings import Settings
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.engine import Request
from specdec_core.models.pair import load_pair
from specdec_core.prompts import stdlib
from specdec_core.recordings.record import record_requests
from specdec_core.recordings.schema import Trace
from specdec_core.training.heads.metrics import auc

OPENING = 32
"""Alignment is also measured on this many generated tokens alone: the part before a small model
begins to repeat itself is the harder one."""


def evaluate(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, out: Path, report: Report
) -> dict[str, Any]:
    """Held-out loss, and alignment by prompt split, of the models in `out`.

    Alignment is in float32 over the bundled prompts' greedy trajectories.
    """
    runner = RunnerSettings(device="cpu", target_dtype="float32", draft_dtype="float32", pack=False)
    weights = out / "weights"
    drafts = {name: str(weights / name) for name in settings.drafts}
    pair = load_pair(PairSpec(target=str(weights / "target"), drafts=drafts, runner=runner))
    models = {"target": pair.target, **pair.drafts}
    results = _held_out_losses(settings, tokenizer, models) | {"alignment": {}}
    for done, split in enumerate(stdlib.SPLITS, start=1):
        prompts, _ = stdlib.resolve_prompts(split, tokenizer, out / "prompts.json")
        requests = [
            Request(name, tuple(tokenizer(text)["input_ids"]), settings.new_tokens)
            for name, text in prompts
        ]
        with TemporaryDirectory() as folder:
            recording = record_requests(pair, requests, Path(folder), mixing=0, continuations=False)
            traces = {name: recording.trace(name, hidden=False) for name in settings.drafts}
        for key, most in ((split, settings.new_tokens), (f"{split}_first_{OPENING}", OPENING)):
            results["alignment"][key] = {
                name: aligned(trace, most) for name, trace in traces.items()
            }
        report("evaluate", done / len(stdlib.SPLITS), {})
    return results


def aligned(trace: Trace, most: int) -> dict[str, float]:
    """How well a draft follows its target over the first `most` tokens of each greedy output.

    `oracle_verification_rate` is SpecDec++'s (Thm 4.1): a draft that always stops just before its
    next rejection needs one target forward a disagreement, and one to end each trajectory, so
    (disagreements + trajectories) / positions. The two AUCs say how well the draft's confidence
    (its top probability; low) and its entropy (high; nats) tell disagreements from agreements: 0.5
    is chance; NaN where either are none.
    """
    among = trace.position[trace.trajectory] < most
    rows, rejected = trace.trajectory[among], ~trace.agrees[among]
    confidence, entropy = trace.top_probability[rows], trace.entropy[rows]
    trajectories, positions = len(np.unique(trace.prompt[rows])), len(rows)
    disagreements = int(rejected.sum())
    return {
        "trajectories": trajectories,
        "positions": positions,
        "disagreements": disagreements,
        "agreement": 1 - disagreements / positions,
        "oracle_verification_rate": (disagreements + trajectories) / positions,
        "confidence_auc": auc(-confidence, rejected),
        "entropy_auc": auc(entropy, rejected),
        "mean_confidence": float(confidence.mean()),
        "mean_entropy": float(entropy.mean()),
    }


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
