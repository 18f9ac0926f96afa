"""vLLM completes the same prompts with the same tokens, from its own environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_core.errors import UserError
from specdec_core.pair import Pair
from specdec_core.peers import peers_of
from specdec_core.peers.vllm import VENV

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
        assert f"K={speculative['num_speculative_tokens']}" in peer.name
        draft = speculative.get("model")
        assert (draft == tiny_pair.spec.drafts["draft"]) == peer.name.endswith(", draft")


def test_without_its_environment_the_command_that_makes_it_is_named(
    tiny_pair: Pair, tmp_path: Path
) -> None:
    [peer, *_] = peers_of(tiny_pair, ["vllm"], tmp_path / "none")
    with pytest.raises(UserError, match=r"vLLM: no .*none; `make bench-peers` makes it"):
        peer.open()
    peer.close()


@installed
def test_vllm_and_transformers_write_the_same(tiny_pair: Pair) -> None:
    reference = peers_of(tiny_pair, ["transformers"])[0]
    peers = peers_of(tiny_pair, ["vllm"])
    drafted = next(peer for peer in peers if peer.name.endswith(", draft"))
    ngram = next(peer for peer in peers if "n-gram" in peer.name)
    with reference:
        expected = reference.decode(PROMPT, 24)
    for peer in (peers[0], drafted, ngram):
        with peer:
            assert peer.decode(PROMPT, 24) == expected, peer.name
            first, again, other = (peer.decode(PROMPT, 16, 1.0, seed) for seed in (1, 1, 2))
            assert first == again != other
            assert peer.version.startswith("vllm ")
            with pytest.raises(UserError, match=r"vLLM.*: .*maximum"):
                peer.decode(PROMPT, 100_000)
