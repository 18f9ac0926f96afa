import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.bundled_pair import corpus as made
from research.bundled_pair.evaluation import aligned
from specdec_core.base import bundled
from specdec_core.base.bundled import PAIR, bundled_path
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.engine import Request
from specdec_core.models.pair import load_pair
from specdec_core.prompts import stdlib as corpus
from specdec_core.recordings.record import record_requests

MEBIBYTE = 1024 * 1024


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_path("target"))


# --- the committed pair -----------------------------------------------------------------------


def test_stored_weights_are_unpacked_once_whole_or_not_at_all(tmp_path, monkeypatch):
    unpacked, models = bundled_path.__wrapped__, tmp_path / "cache" / "specdec" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "STORED", shutil.copytree(bundled.STORED, tmp_path / "stored"))
    stored = tmp_path / "stored" / "draft-small" / "model.safetensors.xz"
    whole = stored.read_bytes()
    stored.write_bytes(whole[:-1000])
    with pytest.raises(UserError, match=r"model\.safetensors\.xz: damaged or cut off"):
        unpacked("draft-small")
    assert not [path for path in models.iterdir() if path.is_dir()]
    stored.write_bytes(whole)
    with ThreadPoolExecutor(4) as pool:
        [folder] = set(pool.map(unpacked, ["draft-small"] * 4))
    assert [path for path in models.iterdir() if path.is_dir()] == [folder]
    for file in bundled_path("draft-small").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_models_share_one_vocabulary_and_tokenizer():
    tokenizers = [AutoTokenizer.from_pretrained(bundled_path(name)) for name in PAIR]
    assert len({json.dumps(t.get_vocab(), sort_keys=True) for t in tokenizers}) == 1
    for name in PAIR:
        config = json.loads((bundled_path(name) / "config.json").read_text())
        assert config["vocab_size"] == len(tokenizers[0])
        assert config["eos_token_id"] == tokenizers[0].eos_token_id


def test_weights_are_bfloat16_and_small_enough_for_the_repository():
    for name in PAIR:
        model = AutoModelForCausalLM.from_pretrained(bundled_path(name))
        assert model.dtype == torch.bfloat16
    files = [path for path in bundled.STORED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 40 * MEBIBYTE


def test_draft_follows_the_target_on_held_out_prompts(tokenizer, tmp_path):
    exact = RunnerSettings(target_dtype="float32", draft_dtype="float32")
    prompts = corpus.resolve_prompts("held_out", tokenizer)[0][:8]
    requests = [Request(name, tuple(tokenizer(text)["input_ids"]), 64) for name, text in prompts]
    pair = load_pair(PairSpec(runner=exact))
    recording = record_requests(pair, requests, tmp_path, mixing=0, continuations=False)
    found = aligned(recording.trace("medium", hidden=False), 64)
    assert found["oracle_verification_rate"] < 0.4
    assert found["confidence_auc"] > 0.7


# --- corpus and prompts -----------------------------------------------------------------------


def test_held_out_modules_are_a_tenth_and_never_seen():
    held_out, seen = corpus.modules_of("held_out"), corpus.modules_of("seen")
    assert not set(held_out) & set(seen)
    assert 0.05 < len(held_out) / (len(held_out) + len(seen)) < 0.2
    assert not [name for name in held_out + seen if "test" in name.split(".")]


def test_prompts_are_32_to_256_tokens_and_kept_apart(tokenizer):
    for split, count in (("held_out", 128), ("seen", 64)):
        references = corpus.load_references(split)
        assert len(references) == count
        assert {corpus.split_of(reference.module) for reference in references} == {split}
        prompts, _ = corpus.resolve_prompts(split, tokenizer)
        assert len({name for name, _ in prompts}) == len(prompts) > 0
        lengths = [len(tokenizer(text)["input_ids"]) for _, text in prompts]
        assert min(lengths) >= 30
        assert max(lengths) <= 258


def test_training_prompts_come_from_modules_that_no_other_prompt_comes_from(tokenizer):
    drawn = list(corpus.training_prompts(tokenizer))
    if sys.version_info[:2] == (3, 11):  # another version's library has other modules
        assert len(drawn) == corpus.TRAINING_PROMPTS
    assert 0.9 * corpus.TRAINING_PROMPTS < len(drawn) <= corpus.TRAINING_PROMPTS
    assert len({name for name, _ in drawn}) == len(drawn)
    modules = {name.removeprefix("stdlib/").partition(":")[0] for name, _ in drawn}
    assert {corpus.split_of(module) for module in modules} == {"seen"}
    others = [*corpus.load_references("seen"), *corpus.load_references("held_out")]
    assert not modules & {reference.module for reference in others}
    assert list(corpus.training_prompts(tokenizer, 5)) == drawn[:5]


def test_missing_reference_is_one_clear_line_or_reported(tokenizer, tmp_path):
    path = tmp_path / "prompts.json"
    rows = [
        corpus.PromptReference("json.decoder", "JSONDecoder.raw_decode", 64, "seen"),
        corpus.PromptReference("json.decoder", "no_such_function", 64, "seen"),
        corpus.PromptReference("no_such_module", "f", 64, "seen"),
    ]
    made.save_references(rows, path)
    prompts, skipped = corpus.resolve_prompts("seen", tokenizer, path)
    assert [name for name, _ in prompts] == ["stdlib/json.decoder:JSONDecoder.raw_decode"]
    assert len(skipped) == 2
    assert "has no 'no_such_function' here" in skipped[0]
