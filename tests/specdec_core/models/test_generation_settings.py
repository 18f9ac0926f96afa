"""What a checkpoint's generation_config asks for beyond what is supported is left out, with a line
that says so, here and in peers alike."""

import inspect
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from transformers import GenerationMixin

from specdec_core.engine import Engine, Request
from specdec_core.models.generation_settings import NEUTRAL
from specdec_core.models.loading import load_skeleton
from specdec_core.models.pair import load_pair
from tests.peers import peers_of

PROMPT, NEW = (7, 8, 9, 10) * 3, 12
ASKED = {
    "repetition_penalty": 1.8,
    "min_p": 0.9,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": list(range(1, 40)),
    "typical_p": 0.2,
}
SUPPORTED = {"do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.4, "eos_token_id": [0]}


@pytest.fixture
def asking(tiny_pair_folders, tiny_spec, tmp_path):
    """The tiny pair, from checkpoints that ask for all of this."""
    for name, folder in tiny_pair_folders.items():
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(json.dumps(ASKED | SUPPORTED))
    folders = {"target": str(tmp_path / "target"), "drafts": {"draft": str(tmp_path / "draft")}}
    return tiny_spec.model_copy(update=folders)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("specdec_core")]


def test_what_is_not_supported_is_said_once(asking, caplog):
    with caplog.at_level(logging.WARNING):
        pair = load_pair(asking)
        [transformers, *_] = peers_of(pair, "transformers")
        transformers.open()
        load_pair(asking)
    [said] = warnings(caplog)
    assert said.startswith(f"{asking.target}: ")
    assert "repetition_penalty 1.8, " in said
    assert all(key in said for key in ASKED)
    assert not any(key in said for key in SUPPORTED)
    assert len(said) < 300


def test_what_changes_nothing_is_not_mentioned(asking, caplog):
    neutral = {k: v for k, v in NEUTRAL.items() if v is not None} | {"suppress_tokens": []}
    (Path(asking.target) / "generation_config.json").write_text(json.dumps(neutral | SUPPORTED))
    with caplog.at_level(logging.WARNING):
        load_pair(asking)
    assert warnings(caplog) == []


def test_what_a_configuration_asks_for_is_said_too(asking, caplog):
    """Old checkpoints have no generation_config.json; transformers reads their config.json."""
    folder = Path(asking.target)
    (folder / "generation_config.json").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.8}))
    with caplog.at_level(logging.WARNING):
        pair = load_pair(asking)
    [said] = warnings(caplog)
    assert "repetition_penalty 1.8" in said
    skeleton = load_skeleton(asking.target).generation_config
    assert skeleton.to_dict() == pair.target.generation_config.to_dict()


def test_all_that_transformers_would_heed_is_known():
    ours = {"do_sample", "temperature", "top_k", "top_p", "max_length"}
    neither = {"use_cache", "renormalize_logits", "remove_invalid_values"}  # nor changes the text
    drafting = {"is_assistant", "assistant_confidence_threshold"}
    read = set()
    for method in ("_get_logits_processor", "_get_stopping_criteria"):
        source = inspect.getsource(getattr(GenerationMixin, method))
        read |= set(re.findall(r"generation_config\.([a-z]\w+)", source))
    assert len(read) > 20
    assert read - ours - neither - drafting <= set(NEUTRAL)


def test_transformers_samples_as_the_engine_does(asking, tiny_spec, monkeypatch):
    # The data type of transformers' drafts is measured: on a busy machine it may be another one.
    monkeypatch.setattr("specdec_core.models.pair._faster_dtype", lambda *_: "float32")
    pair, plain = load_pair(asking), load_pair(tiny_spec)
    [expected] = Engine(pair).generate([Request("", PROMPT, NEW)])
    both = zip(peers_of(pair, "transformers"), peers_of(plain, "transformers"), strict=True)
    for peer, unasked in both:
        with peer, unasked:
            assert tuple(peer.decode(PROMPT, NEW)) == tuple(expected.tokens), peer.name
            unasked.decode(PROMPT, NEW)  # both keep their K over the same requests
            for seed in range(3):
                drawn = unasked.decode(PROMPT, NEW, 1.0, seed)
                assert peer.decode(PROMPT, NEW, 1.0, seed) == drawn, peer.name


def test_vllm_does_not_read_what_a_checkpoint_asks_for(asking):
    for peer in peers_of(load_pair(asking), "vllm"):
        assert peer.settings["engine"]["generation_config"] == "vllm"
