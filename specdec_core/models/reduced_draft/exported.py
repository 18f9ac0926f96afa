"""A draft with a reduced vocabulary as a plain Llama, as other programs read it: made once, then
kept.

A Llama's output layer has a row for every token and no bias. A token outside the draft vocabulary
gets the mean row of the draft vocabulary. Its logit is then the mean logit and never the largest,
so the same tokens are the most likely. Sampling draws such tokens with a small probability (1 %
with SmolLM2's draft).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig

from specdec_core.base.files import atomic_folder, made_once
from specdec_core.base.workspace import kept_folder
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.loading import load_tokenizer
from specdec_core.models.reduced_draft.model import ReducedDraft
from specdec_core.models.reduced_draft.storing import load_reduced
from specdec_core.models.weight_files import WEIGHTS


def exported_draft(name: str, target: str, dtype: torch.dtype) -> Path:
    """The folder of the draft of that name as a Llama with the tokenizer of its `target`, in a data
    type. Raises :class:`UserError` where the draft is damaged or for another target."""
    both = f"{fingerprint(name)}-{fingerprint(target)}"
    folder = kept_folder("drafts") / f"{both}-{str(dtype).removeprefix('torch.')}"
    return made_once(folder, lambda: _write(load_reduced(name, target, dtype), target, folder))


def _write(draft: ReducedDraft, target: str, folder: Path) -> None:
    values = draft.config.to_dict()
    for name in ("model_type", "reduced"):
        del values[name]
    dtype = draft.dtype
    config = LlamaConfig(**values | {"architectures": ["LlamaForCausalLM"], "dtype": dtype})
    tensors = {"lm_head.weight": whole_output(draft)}
    tensors |= {f"model.{key}": tensor for key, tensor in draft.model.state_dict().items()}
    with atomic_folder(folder) as new:
        stored = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        (new / WEIGHTS).write_bytes(save(stored, metadata={"format": "pt"}))
        config.save_pretrained(new)
        load_tokenizer(target).save_pretrained(new)


def whole_output(draft: ReducedDraft) -> Tensor:
    """The matrix of an output layer over the whole vocabulary (vocabulary, width)."""
    rows = draft.lm_head.linear.weight.detach()
    whole: Tensor = rows.float().mean(0).to(rows.dtype).repeat(draft.config.vocab_size, 1)
    whole[draft.lm_head.tokens] = rows
    return whole
