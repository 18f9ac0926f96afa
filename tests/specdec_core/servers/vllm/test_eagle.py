"""vLLM serves a head that is saved here, and drafts with it what the head drafts here."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec_core.base.bundled import resolve_path
from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import load_head, save_head
from specdec_core.servers.vllm.process import VENV, inherited_environment, process_environment

pytestmark = pytest.mark.skipif(
    not (VENV / "bin" / "python").exists(), reason="vLLM is not installed; `make bench-peers` does"
)
SCRIPT = Path(__file__).with_name("drafts.py")
PROMPT, NEW, DRAFTED = list(range(5, 20)), 8, 3


def drafts_of_vllm(folder):
    request = {"head": str(folder), "prompt": PROMPT, "new": NEW}
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-P", str(SCRIPT)],
        input=json.dumps(request),
        env=inherited_environment() | process_environment(1),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@torch.no_grad()
def drafted(head, target, text):
    """What the head expects after a text, one token after the other."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.settings.feature_layers], -1)
    read, tokens = head.fused(features)[:, :-1], text[1:]
    for _ in range(DRAFTED):
        n = len(tokens)
        mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
        after = head(torch.tensor([tokens]), read, torch.arange(n)[None], mask)
        tokens = [*tokens, int(head.spread(head.logits(after[:, -1])).argmax())]
        read = torch.cat([read, after[:, -1:]], 1)
    return tokens[-DRAFTED:]


VARIANT = {"feature_layers": (1, 5), "norm_before_residual": True, "norm_before_fc": True}


@pytest.mark.parametrize(
    ("vocabulary", "changes"), [(1000, {}), pytest.param(4096, VARIANT, marks=pytest.mark.long)]
)
def test_vllm_drafts_the_same(tmp_path, vocabulary, changes):
    name = resolve_path("bundled:target")
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    head = EagleHead(EagleSettings.for_target(target.config, vocabulary, **changes))
    head.propose_only(torch.randperm(4096)[:vocabulary].sort().values)
    card = EagleCard(target=name, target_fingerprint="0" * 16, speculative_tokens=DRAFTED)
    save_head(head, tmp_path / "head", card)
    found = drafts_of_vllm(tmp_path / "head")
    loaded = load_head(str(tmp_path / "head"), target.config)
    loaded.embed_tokens = target.get_input_embeddings()
    read = len(PROMPT)
    for draft in found["drafts"]:
        read += 1  # a random head's drafts are not accepted
        text = [*PROMPT, *found["tokens"]][:read]
        assert drafted(loaded, target, text) == draft
    assert read == len(PROMPT) + NEW
