"""Forwards of a shape with random weights, and the bytes that they must read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, PreTrainedModel

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.measure.profiling import fill
from specdec_core.models.compiled import CompiledRunner
from specdec_core.models.eager import EagerRunner
from specdec_core.models.loading import build
from specdec_core.models.runner import ModelRunner, time_forward

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
_COPIED = 2**30  # bytes of the tensor that is copied to measure a GPU's bandwidth


class TimedForward(NamedTuple):
    rows: int
    width: int  # tokens of each row
    context: int
    seconds: float
    read: int  # bytes of weights and KV cache


def random_model(shape: str, dtype: str) -> PreTrainedModel:
    """A model of that shape on the GPU, or else the CPU. Raises :class:`UserError` where it does
    not fit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UserError(f"--dtype {dtype}: expected bfloat16, float16 or float32")
    config = LlamaConfig(max_position_embeddings=131_072, dtype=kind, **SHAPES[shape])
    try:
        with torch.device("meta"):
            model: Any = build(config, shape)
        model = model.to(kind).to_empty(device=device)
        model.tie_weights()
        generator = torch.Generator(device).manual_seed(0)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02, generator=generator)
        rope = model.model.rotary_emb  # its frequencies are no parameters
        model.model.rotary_emb = type(rope)(config).to(device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"--shape {shape}: its weights do not fit this device") from error
    return model


def bandwidth(device: torch.device, repeats: int = 9) -> float:
    """Bytes a second that copies within the device's memory read and write."""
    size = _COPIED if device.type == "cuda" else _COPIED // 8
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        copy.copy_(source)
        copy[0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times[1:])


def bytes_read(model: PreTrainedModel, rows: int, context: int) -> int:
    """What a forward reads at least: each weight once, of the embeddings nothing where the output
    layer has its own, and each row's KV cache."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    embeddings = next(model.get_input_embeddings().parameters())
    if not config.tie_word_embeddings:
        weights -= embeddings.numel() * embeddings.element_size()
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return int(weights + rows * context * cached * embeddings.element_size())


def time_shape(
    model: PreTrainedModel,
    rows: Sequence[int],
    widths: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    compiled: bool,
    observer: Observer,
) -> list[TimedForward]:
    """Time forwards of every number of rows, tokens and context if their KV cache fits the device.
    A step is a number of rows at a context."""
    timed = []
    observer.stage("compiled forwards" if compiled else "eager forwards", len(rows) * len(contexts))
    for context in sorted(contexts):
        for count in sorted(rows):
            runner: ModelRunner | None = None
            try:
                runner = _runner(model, count, context + max(widths), compiled)
                with torch.inference_mode():
                    fill(runner, context)
                for width in widths:
                    seconds = [time_forward(runner, width, count) for _ in range(repeats + 2)]
                    read = bytes_read(model, count, context)
                    median = statistics.median(seconds[2:])
                    timed.append(TimedForward(count, width, context, median, read))
            except (torch.OutOfMemoryError, UserError):  # a cache that does not fit is the latter
                observer.warned(f"{count} rows of {context} tokens do not fit this device")
            runner = None  # its memory is given back, also where it was too little
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
            observer.step()
    return timed


def _runner(model: PreTrainedModel, rows: int, length: int, compiled: bool) -> ModelRunner:
    eager = EagerRunner(model, rows, length, compact=True if compiled else None)
    return CompiledRunner(eager, f"random {model.config.hidden_size}") if compiled else eager
