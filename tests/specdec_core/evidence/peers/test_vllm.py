"""vLLM completes the same prompts with the same tokens, from its own environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec_core.base.bundled import resolve_path
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.evidence.peers.choose import peers_of
from specdec_core.evidence.peers.vllm import (
    DRAFT_MODEL,
    SUFFIX,
    VENV,
    VllmPeer,
    engine_settings,
    has_suffix,
)
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import load_head, save_head
from specdec_core.models.pair import Pair, load_pair
from specdec_core.plugins.vllm_sampling import expanded
from tests.conftest import tiny_llama
from tests.specdec_core.models.eagle.pair_heads import head_of
from tests.specdec_core.models.reduced_draft.drafts import write_draft

installed = pytest.mark.skipif(
    not (VENV / "bin" / "python").exists(), reason="vLLM is not installed; `make bench-peers` does"
)
PROMPT = tuple(range(5, 14))


def test_every_draft_gets_every_length(tiny_pair: Pair) -> None:
    peers = peers_of(tiny_pair, ["vllm"])
    names = [peer.name for peer in peers]
    assert len(set(names)) == len(names)
    assert names[0] == "vLLM"
    for peer in peers[1:]:
        speculative = json.loads(json.dumps(peer.settings))["engine"]["speculative_config"]
        if speculative.get("method") == "suffix":
            continue  # it chooses its lengths itself
        assert f"K={speculative['num_speculative_tokens']}" in peer.name
        draft = speculative.get("model")
        assert (draft == tiny_pair.spec.drafts["draft"]) == peer.name.endswith(", draft")


def test_a_head_is_exported_for_it_once(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    saved = head_of(tiny_pair, feature_layers=(0, 1))
    card = EagleCard(target=tiny_pair.spec.target, target_fingerprint="0")
    save_head(saved, tmp_path / "head", card, form="int8")
    drafts = {**tiny_pair.spec.drafts, "eagle": str(tmp_path / "head")}
    spec = tiny_pair.spec.model_copy(update={"drafts": drafts})
    config = tiny_pair.target.config
    head = load_head(drafts["eagle"], config)
    pair = Pair(spec, tiny_pair.tokenizer, tiny_pair.target, {**tiny_pair.drafts, "eagle": head})
    settings = [
        peer.settings["engine"]["speculative_config"]
        for peer in peers_of(pair, ["vllm"])
        if peer.name.endswith(", eagle")
    ]
    assert {own["method"] for own in settings} == {"eagle3"}
    [folder] = {own["model"] for own in settings}
    exported = load_head(folder, config)
    assert "int8" not in (Path(folder) / "config.json").read_text()
    assert torch.equal(exported.lm_head.weight, head.lm_head.weight)
    assert not any(peer.name.endswith(", eagle") for peer in peers_of(pair, ["transformers"]))
    pair.drafts["eagle"] = head_of(tiny_pair, feature_layers=(0, 2))  # after the target's norm
    assert not any(peer.name.endswith(", eagle") for peer in peers_of(pair, ["vllm"]))


def test_a_draft_with_another_number_of_logits_has_its_tokens_paired(tiny_pair: Pair) -> None:
    size = tiny_pair.target.config.vocab_size + 64
    padded = tiny_llama(0, hidden=32, layers=2, vocab=size)
    pair = Pair(tiny_pair.spec, tiny_pair.tokenizer, tiny_pair.target, {"draft": padded})
    for own, paired in ((tiny_pair, None), (pair, True)):
        settings = engine_settings(own, DRAFT_MODEL[0], "draft")["speculative_config"]
        assert settings.get("use_heterogeneous_vocab") == paired
        assert ("draft_sample_method" in settings) == (paired is None)


def test_a_draft_with_a_reduced_vocabulary_is_exported_for_it(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_draft(tiny_pair.spec, tmp_path / "draft", list(range(1, 300, 3)))
    spec = tiny_pair.spec.model_copy(update={"drafts": {"small": str(tmp_path / "draft")}})
    settings = [
        peer.settings["engine"]["speculative_config"]
        for peer in peers_of(load_pair(spec), ["vllm"])
        if peer.name.endswith(", small")
    ]
    assert {own["method"] for own in settings} == {"draft_model"}
    [folder] = {own["model"] for own in settings}
    assert '"LlamaForCausalLM"' in (Path(folder) / "config.json").read_text()


def test_without_its_environment_the_command_that_makes_it_is_named(
    tiny_pair: Pair, tmp_path: Path
) -> None:
    [peer, *_] = peers_of(tiny_pair, ["vllm"], tmp_path / "none")
    with pytest.raises(UserError, match=r"vLLM: no .*none; `make bench-peers` makes it"):
        peer.open()
    peer.close()


def test_each_token_gets_the_temperature_of_its_request() -> None:
    temperatures, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5])
    assert expanded(temperatures, ends, 5).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert expanded(temperatures, ends + 1, 6, 0, 1).tolist() == [0.5] * 3 + [2.0] * 3
    assert expanded(temperatures, torch.tensor([1, 2, 2]), 2, 0, 1).tolist() == [0.5, 1.0]


@installed
def test_vllm_and_transformers_write_the_same() -> None:
    """On the bundled pair: vLLM has no attention for heads as narrow as the tiny pair's."""
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}, runner=runner))
    [reference, *_] = peers_of(pair, ["transformers"])
    with reference:
        expected = reference.decode(PROMPT, 24)
    peers = {peer.name: peer for peer in peers_of(pair, ["vllm"])}
    for name in ("vLLM", "vLLM draft model K=3, small"):
        with peers[name] as peer:
            assert peer.decode(PROMPT, 24) == expected, name
            assert sum(peer.steps) == 24
            assert (max(peer.steps) > 1) == ("draft" in name)
            drawn = [peer.decode(PROMPT, 16, 1.0, seed) for seed in (1, 1, 2)]
            assert drawn[0] != drawn[2]
            if name == "vLLM":  # its draft models draw without the seed
                assert drawn[0] == drawn[1]
            assert peer.version.startswith("vllm ")
            assert peer.read(16, repeats=2) > 0  # fails where a text is not given up
            with pytest.raises(UserError, match=r"vLLM.*: .*maximum"):
                peer.decode(tuple(range(5, 300)), 10)


@pytest.mark.long
@pytest.mark.skipif(not has_suffix(VENV), reason="arctic-inference is not installed for vLLM")
def test_suffix_decoding_forgets_the_answers_of_earlier_requests() -> None:
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    pair = load_pair(PairSpec(drafts={}, runner=runner))
    with VllmPeer(pair, SUFFIX) as peer:
        forwards = []
        for _ in range(2):
            peer.decode(PROMPT, 48)
            forwards.append(len(peer.steps or ()))
        peer.forget()
        peer.decode(PROMPT, 48)
        assert forwards[1] < forwards[0] == len(peer.steps or ())


@installed
def test_vllm_drafts_with_a_draft_of_a_reduced_vocabulary(tmp_path: Path) -> None:
    """Untrained, it proposes little that is accepted."""
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    spec = PairSpec(target=resolve_path("bundled:target"), drafts={}, runner=runner)
    write_draft(spec, tmp_path / "draft", list(range(1, 4000, 3)), "target")
    pair = load_pair(spec.model_copy(update={"drafts": {"small": str(tmp_path / "draft")}}))
    peers = {peer.name: peer for peer in peers_of(pair, ["vllm"])}
    written = []
    for name in ("vLLM", "vLLM draft model K=3, small"):
        with peers[name] as peer:
            written.append(peer.decode(PROMPT, 24))
    assert written[0] == written[1]
