"""The exported pair, measured as it ships."""

import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedTokenizerFast

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
    """Held-out loss, alignment by prompt split, and forward times of the models in `out`.

    Alignment is in float32 over the bundled prompts' greedy trajectories.
    """
    models = {
        name: load_weights(str(out / "weights" / name), torch.float32)
        for name in ("target", *settings.drafts)
    }
    results = _held_out_losses(settings, tokenizer, models) | {"alignment": {}, "distinct": {}}
    for done, split in enumerate(stdlib.SPLITS, start=1):
        prompts = stdlib.resolve_prompts(split, tokenizer, path=out / "prompts.json")
        ids = [tokenizer(text)["input_ids"] for _, text in prompts]
        whole = greedy_trajectories(models["target"], ids, settings.new_tokens)
        openings = [
            Trajectory(t.tokens[: t.prompt_length + OPENING], t.prompt_length) for t in whole
        ]
        for key, trajectories in ((split, whole), (f"{split}_first_{OPENING}", openings)):
            results["alignment"][key] = {
                name: measure_alignment(models["target"], models[name], trajectories).as_dict()
                for name in settings.drafts
            }
        results["distinct"][split] = distinct_share(whole)
        report("evaluate", done / 3, {})
    results |= _forward_times(models)
    report("evaluate", 1.0, {})
    return results


def _held_out_losses(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, models: dict[str, Any]
) -> dict[str, Any]:
    documents = stdlib.encode_documents(tokenizer, stdlib.texts("held_out", settings.modules))
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


def distinct_share(trajectories: list[Trajectory], n: int = 4) -> float:
    """Share of the generated n-grams that are distinct: how little the target repeats itself."""
    grams = [
        tuple(t.tokens[start : start + n].tolist())
        for t in trajectories
        for start in range(t.prompt_length, len(t.tokens) - n + 1)
    ]
    return len(set(grams)) / max(1, len(grams))


def _forward_times(models: dict[str, Any]) -> dict[str, Any]:
    """`forward_ms` by dtype, in milliseconds. Leaves the models in bfloat16."""
    forward_ms = {}
    for dtype in (torch.float32, torch.bfloat16):
        seconds = forward_seconds({name: model.to(dtype) for name, model in models.items()})
        forward_ms[str(dtype).removeprefix("torch.")] = {n: 1000 * s for n, s in seconds.items()}
    return {"forward_ms": forward_ms}


@torch.inference_mode()
def forward_seconds(
    models: dict[str, Any], *, context: int = 192, turns: int = 30, turn: int = 8
) -> dict[str, float]:
    """Median seconds of a forward of one cached token on one thread, the models interleaved: `turn`
    forwards of each in a row, as a draft runs them between two of the target's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    prompt = torch.zeros(1, context, dtype=torch.long)
    caches = {name: DynamicCache(config=model.config) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        model(prompt, past_key_values=caches[name])
    for _ in range(turns):
        for name, model in models.items():
            for _ in range(turn):
                begun = time.perf_counter()
                model(prompt[:, :1], past_key_values=caches[name])
                times[name].append(time.perf_counter() - begun)
    torch.set_num_threads(threads)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
