"""Other programs read a draft with a reduced vocabulary as a plain Llama that drafts the same."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec_core.models.pair import load_drafts
from specdec_core.models.reduced_draft.exported import exported_draft
from tests.specdec_core.models.reduced_draft.drafts import TABLES, write_draft

PROPOSABLE = list(range(1, 300, 3))  # without the first token


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tables", TABLES)
def test_a_plain_llama_drafts_the_same(tiny_spec, tmp_path, tables, dtype):
    write_draft(tiny_spec, tmp_path / "draft", PROPOSABLE, tables)
    name = str(tmp_path / "draft")
    spec = tiny_spec.with_runner(
        device="cpu", draft_dtype=str(dtype).removeprefix("torch."), pack=False
    )
    draft: Any = load_drafts(spec.model_copy(update={"drafts": {"d": name}}))["d"]
    folder = exported_draft(name, tiny_spec.target, dtype)
    plain = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    assert plain.dtype == dtype
    texts = torch.randint(0, draft.config.vocab_size, (32, 24), generator=torch.manual_seed(0))
    with torch.inference_mode():
        expected, found = draft(texts).logits.float(), plain(texts).logits.float()
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.3}
    torch.testing.assert_close(found[..., PROPOSABLE], expected[..., PROPOSABLE], **exact)
    others = [token for token in range(draft.config.vocab_size) if token not in PROPOSABLE]
    assert (found[..., others].amax(-1) < found[..., PROPOSABLE].amax(-1)).all()
    if dtype == torch.float32:
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
    vocabulary = AutoTokenizer.from_pretrained(tiny_spec.target).get_vocab()
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == vocabulary


def test_it_is_made_once_for_each_draft_and_data_type(tiny_spec, tmp_path):
    folders = []
    for seed, dtype in ((0, torch.float32), (0, torch.float32), (0, torch.bfloat16), (1, None)):
        proposable = [token + seed for token in PROPOSABLE]
        draft = tmp_path / f"draft {len(folders)}"
        write_draft(tiny_spec, draft, proposable)
        dtype = dtype or torch.float32
        folders.append(exported_draft(str(draft), tiny_spec.target, dtype))
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3
