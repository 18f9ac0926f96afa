"""A model of the pair, its optimiser, and a training loop that resumes from its checkpoint."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_core.base.files import atomic_path
from specdec_core.training.bundled_pair.settings import Settings, Shape

Report = Callable[[str, float, dict[str, float]], None]
"""Called with the phase, the share of it that is done (0 to 1) and its figures so far."""

Batch = tuple[torch.Tensor, dict[str, float], int]
"""A batch's loss, with gradients, other figures of it, and its tokens."""

_SAVED_AS = {"loss": "average", "own_text_agreement": "following"}  # running means in checkpoints


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


class Optimiser:
    """Muon for the hidden matrices, AdamW for embeddings and norms, one schedule for both."""

    def __init__(self, model: torch.nn.Module, matrix_rate: float, other_rate: float) -> None:
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(hidden, lr=matrix_rate, weight_decay=0.05),
            torch.optim.AdamW(rest, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, scale: float) -> None:
        """One update at `scale` times the base rates."""
        for optimiser in self.parts:
            for group in optimiser.param_groups:
                group["lr"] = group.setdefault("base_rate", group["lr"]) * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser in self.parts]

    def restore(self, states: list[dict[str, Any]]) -> None:
        for optimiser, state in zip(self.parts, states, strict=True):
            optimiser.load_state_dict(state)


class Training:
    """Trains one model until a budget of tokens or of minutes is spent, whichever comes first.

    The learning rate follows the share that is spent, so that a training on a busy machine still
    ends annealed. Checkpoints are in `work`, and :meth:`run` goes on from the latest.
    """

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        optimiser: Optimiser,
        work: Path,
        *,
        tokens: int,
        minutes: float,
        checkpoint_seconds: float,
    ) -> None:
        self.name, self.model, self.optimiser, self.work = name, model, optimiser, work
        self.tokens, self.minutes = tokens, minutes
        self.checkpoint_seconds = checkpoint_seconds
        self.batches = self.seen = 0  # batches and tokens so far
        self.seconds = 0.0
        self.means: dict[str, float] = {}  # running means of a batch's figures
        self.checkpoint = work / f"{name}.checkpoint.pt"
        if self.checkpoint.exists():
            self._resume()

    @property
    def share(self) -> float:
        by_time = self.seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(self.seen / self.tokens, by_time))

    def _rate(self) -> float:
        """A short warm-up, a plateau, then linearly to zero over the last three quarters."""
        return min(1.0, (self.share + 0.002) / 0.02, (1 - self.share) / 0.75)

    def run(self, forward: Callable[[int], Batch], report: Report) -> None:
        """Train to the end; `forward` takes a batch's number."""
        saved = time.monotonic()
        while self.share < 1:
            begun = time.monotonic()
            loss, figures, tokens = forward(self.batches)
            loss.backward()
            self.optimiser.step(self._rate())
            self.batches += 1
            weight = max(0.02, 1 / self.batches)
            for name, value in {"loss": loss.item(), **figures}.items():
                mean = self.means.get(name, 0.0)
                self.means[name] = mean + (value - mean) * weight
            self.seen += tokens
            self.seconds += time.monotonic() - begun
            speed = {"tokens": self.seen, "tokens_per_second": self.seen / self.seconds}
            report(self.name, self.share, self.means | speed)
            if time.monotonic() - saved > self.checkpoint_seconds:
                saved = time.monotonic()
                self._save()

    def finish(self, **facts: float) -> None:
        """Write the weights, and `facts` about their training, to `work`/<name>.pt."""
        facts = {"tokens": self.seen, "seconds": self.seconds, **facts}
        save(self.work / f"{self.name}.pt", {"model": self.model.state_dict(), "facts": facts})

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state(),
            "number": self.batches,
            **{_SAVED_AS[name]: mean for name, mean in self.means.items()},
            "seen": self.seen,
            "seconds": self.seconds,
        }
        save(self.checkpoint, state)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.restore(state["optimiser"])
        self.means = {name: state[key] for name, key in _SAVED_AS.items() if key in state}
        self.batches, self.seen, self.seconds = state["number"], state["seen"], state["seconds"]
