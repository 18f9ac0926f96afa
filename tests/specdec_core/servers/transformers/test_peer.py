"""transformers' modes write what `generate` writes, and draw from the whole distribution."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import generated
from tests.peers import peers_of

PROMPT = tuple(range(5, 14))
REPETITIVE = (7, 8, 9, 10) * 5
NEW = 12


@pytest.fixture(scope="module")
def peers(tiny_pair):
    peers = peers_of(tiny_pair, "transformers")
    for peer in peers:
        peer.open()
    return peers


def test_all_modes_write_the_greedy_text(peers, tiny_pair_folders):
    target = AutoModelForCausalLM.from_pretrained(tiny_pair_folders["target"], dtype=torch.float32)
    for prompt in (PROMPT, REPETITIVE):
        text = generated(target, prompt, NEW)
        for peer in peers:
            assert peer.decode(prompt, NEW) == text, peer.name


def test_the_modes_differ_in_what_they_ask_the_target(peers):
    """Every speculative mode needs fewer target forwards than tokens, autoregression one each."""
    target = peers[0]._pair.target
    forwards = []
    hook = target.register_forward_hook(lambda *_: forwards.append(1))
    try:
        for peer in peers:
            forwards.clear()
            count = len(peer.decode(REPETITIVE, NEW))
            if peer.name == "transformers":
                assert len(forwards) == count
            else:
                assert len(forwards) < count, peer.name
    finally:
        hook.remove()


def test_the_heuristics_length_lasts_over_requests_until_it_is_to_forget(peers):
    """So does ours. The modes share the assistant, and none takes another's length."""
    (heuristic,) = (peer for peer in peers if "heuristic" in peer.name)
    target, drafts = heuristic._pair.target, heuristic._pair.draft_models
    settings, lengths = drafts["draft"].generation_config, []

    def starts():
        """The length that the heuristic starts a request with: it is kept at the end."""
        lengths.clear()
        heuristic.decode(REPETITIVE, NEW)
        return lengths[0]

    hook = target.register_forward_hook(lambda *_: lengths.append(settings.num_assistant_tokens))
    try:
        heuristic.forget()
        assert starts() == 5
        learned = settings.num_assistant_tokens
        assert learned != 5
        for peer in peers:
            if peer is not heuristic:
                peer.decode(PROMPT, NEW)
        assert starts() == learned
        heuristic.forget()
        assert starts() == 5
    finally:
        hook.remove()


def test_a_seed_decides_the_drawn_text(peers):
    for peer in peers:
        first, again, other = (peer.decode(PROMPT, 6, 1.0, seed) for seed in (1, 1, 2))
        assert first == again, peer.name
        assert first != other, peer.name


def test_tokens_are_drawn_from_the_whole_distribution(peers, tiny_pair):
    """Hot enough, all tokens are about alike, more than the 50 of transformers' default."""
    drawn = {peers[0].decode(PROMPT, 1, 1000.0, seed)[0] for seed in range(70)}
    assert len(drawn) > 50


def test_names_tell_the_modes_apart_and_settings_fit_json(peers):
    names = [peer.name for peer in peers]
    assert len(set(names)) == len(names)
    assert {"transformers", "transformers assisted heuristic, draft"} <= set(names)
    settings = [json.dumps(peer.settings, sort_keys=True) for peer in peers]
    assert len(set(settings)) == len(settings)
    assert all(peer.version.startswith("transformers ") for peer in peers)
