"""What people use instead, behind one call: transformers' own generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec_core.pair import Pair


@dataclass(frozen=True)
class TransformersMode:
    """A way to call `generate`. Without assistant tokens it decodes autoregressively.

    `schedule` and `confidence` are transformers' num_assistant_tokens_schedule and
    assistant_confidence_threshold (0 turns the threshold off).
    """

    label: str
    assistant_tokens: int | None = None
    schedule: str = "constant"
    confidence: float = 0.0


TRANSFORMERS = TransformersMode("transformers")
ASSISTED = (
    TransformersMode("transformers constant 4", 4),
    TransformersMode("transformers constant 6", 6),
    TransformersMode("transformers heuristic", 5, "heuristic"),
    TransformersMode("transformers confidence 0.4", 20, confidence=0.4),
)


@torch.inference_mode()
def transformers_generate(
    pair: Pair,
    mode: TransformersMode,
    draft: str | None,
    tokens: tuple[int, ...],
    max_new_tokens: int,
) -> list[int]:
    """Greedy new tokens of `generate` for one prompt, assisted by the pair's draft named `draft`
    where there is one."""
    options = {}
    if draft is not None:
        assistant = pair.drafts[draft]
        # `generate` reads these from the assistant, and keeps its adjusted values there.
        settings = assistant.generation_config
        settings.num_assistant_tokens = mode.assistant_tokens
        settings.num_assistant_tokens_schedule = mode.schedule
        settings.assistant_confidence_threshold = mode.confidence
        options["assistant_model"] = assistant
    ids = torch.tensor([tokens], device=pair.target.device)
    output = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=min(pair.eos_token_ids, default=0),
        **options,
    )
    return output[0, len(tokens) :].tolist()
