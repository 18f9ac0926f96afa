"""A model of the pair, its optimiser, and the training of either kind of model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from research.bundled_pair.settings import Settings, Shape
from specdec_core.base.files import atomic_path
from specdec_core.training.optimiser import Optimiser
from specdec_core.training.trainer import Batches, Loop, LoopReport, ModelTrainer

DECAY = 0.05  # of matrices

Report = Callable[[str, float, dict[str, float]], None]
"""Called with the phase, the share of it that is done (0 to 1) and its figures so far."""


def save(path: Path, value: Any) -> None:
    """`torch.save`, whole or not at all."""
    with atomic_path(path) as temporary:
        torch.save(value, temporary)


def build(shape: Shape, settings: Settings, end: int) -> LlamaForCausalLM:
    """A Llama of this shape; the matrices that write to the residual stream start at zero."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            intermediate_size=shape.inner,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=settings.context,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def train(
    name: str,
    model: LlamaForCausalLM,
    optimiser: Optimiser,
    loss: Callable[..., Tensor],
    batches: Batches,
    settings: Settings,
    minutes: float,
    work: Path,
    report: Report,
    **facts: float,
) -> None:
    """Train a model on each of the `batches` once, or until the minutes are spent; then write its
    weights, and `facts` about their training, to `work`/<name>.pt.

    The learning rate follows the share of the budget that is spent, so that a training on a busy
    machine still ends annealed. Checkpoints are in `work`.
    """

    def progress(standing: LoopReport) -> None:
        loss, tokens = standing.loss, standing.count
        figures = {"loss": loss, "tokens": tokens, "tokens_per_second": standing.speed}
        report(name, standing.share, figures)

    loop = Loop(_rate, minutes, report=progress, save_seconds=settings.checkpoint_seconds)
    trainer = ModelTrainer(
        model,
        loss,
        batches,
        work / f"{name}.checkpoints",
        loop,
        optimiser,
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        max_grad_norm=0.0,
        seed=settings.seed,
        use_cpu=True,
        bf16=True,
    )
    trainer.run()
    facts = {
        "tokens": trainer.count,
        "seconds": trainer.seconds,
        "batches": trainer.state.global_step,
        "training_loss": trainer.state.log_history[-1]["loss"],
        **facts,
    }
    save(work / f"{name}.pt", {"model": model.state_dict(), "facts": facts})


def _rate(share: float) -> float:
    """A short warm-up, a plateau, then linearly to zero over the last three quarters."""
    return min(1.0, (share + 0.002) / 0.02, (1 - share) / 0.75)
