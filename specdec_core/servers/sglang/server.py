"""SGLang: command-line options, and a file of lengths by load."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from specdec_core.config import DrafterSettings
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.servers.chains import LengthSettings, fixed_chain
from specdec_core.servers.server import Counterpart, Models, Server, WrittenFiles

ADAPTIVE_FILE = "adaptive.json"
_ALGORITHMS = {"model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


class SgLang(Server):
    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    files = (ADAPTIVE_FILE,)
    heads = "specforge"
    eagle = True

    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
        if (chain := fixed_chain(drafter)) is not None:
            place, kind, *_ = models.draft(chain.draft)
            if kind not in _ALGORITHMS:
                return None
            settings = _model(place, _ALGORITHMS[kind], chain.most, 1, chain.most + 1)
            return _by_load(settings, chain) if chain.scheduled else Counterpart(settings)
        if isinstance(drafter, DynamicTreeSettings) and isinstance(drafter.policy, FixedSettings):
            place, kind, *_ = models.draft(drafter.draft)
            # One number is both: the expanded nodes of a level, and the children of each.
            if kind not in _ALGORITHMS or drafter.expand != drafter.children or drafter.least:
                return None
            steps, width = drafter.policy.max_tokens, drafter.children
            grown = width + (steps - 1) * width**2  # it fails where more are to be kept
            nodes = min(drafter.keep, grown) + 1
            return Counterpart(_model(place, _ALGORITHMS[kind], steps, width, nodes))
        if isinstance(drafter, PromptLookupSettings) and drafter.min_ngram == 1:
            remark = "keeps n-grams of all requests, and runs on CUDA devices only"
            return Counterpart(
                {
                    "speculative-algorithm": "NGRAM",
                    # One of the draft tokens is the root, the last token of the sequence.
                    "speculative-num-draft-tokens": drafter.max_tokens + 1,
                    # The depth counts a match and the tokens that are copied after it.
                    "speculative-ngram-max-trie-depth": drafter.max_ngram + drafter.max_tokens,
                    "speculative-ngram-max-bfs-breadth": 1,
                },
                (remark, *self.other_matches(drafter)),
            )
        return None

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        words = ["python", "-m", "sglang.launch_server", "--model-path", models.target]
        files = {}
        for name, value in counterpart.settings.items():
            if isinstance(value, Mapping):
                files[ADAPTIVE_FILE] = json.dumps(dict(value), indent=1) + "\n"
                value = ADAPTIVE_FILE
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return WrittenFiles(files, shlex.join(words))


def _model(place: str, algorithm: str, steps: int, width: int, nodes: int) -> dict[str, Any]:
    """`nodes` counts the root, the last token of the sequence."""
    return {
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": place,
        "speculative-num-steps": steps,
        "speculative-eagle-topk": width,
        "speculative-num-draft-tokens": nodes,
    }


def _by_load(settings: dict[str, Any], chain: LengthSettings) -> Counterpart | None:
    """The `settings` of the longest chain with a length for every load, which EAGLE heads alone
    have."""
    if settings["speculative-algorithm"] == "STANDALONE":
        return None
    # It chooses among the candidate lengths of a load by acceptance. One length leaves no choice.
    steps = {str(span.low): {"candidate_steps": [span.tokens]} for span in chain.spans}
    return Counterpart(
        {**settings, "speculative-adaptive": True, "speculative-adaptive-config": steps},
        ("rounds the load up to a batch size that it has a CUDA graph of",),
    )
