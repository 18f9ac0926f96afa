"""SGLang: command-line options, and of later versions a file of lengths by load."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from specdec_core.config import DrafterSettings
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.export.server import (
    Counterpart,
    ExportTarget,
    LengthSettings,
    Models,
    WrittenFiles,
    fixed_chain,
)

ADAPTIVE_FILE = "adaptive.json"
_ALGORITHMS = {"model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


class SgLang(ExportTarget):
    name = "sglang"
    title = "SGLang"
    version = "0.5.9"
    known = ("0.5.9",)
    files = (ADAPTIVE_FILE,)
    heads = "specforge"
    eagle = True

    def counterpart(self, drafter: DrafterSettings | None, models: Models) -> Counterpart | None:
        if drafter is None:
            return Counterpart({})
        if (chain := fixed_chain(drafter)) is not None:
            place, kind, *_ = models.draft(chain.draft)
            if kind not in _ALGORITHMS:
                return None
            told = _model(place, _ALGORITHMS[kind], chain.most, 1, chain.most + 1)
            return self.by_load(told, chain) if chain.scheduled else Counterpart(told)
        if isinstance(drafter, DynamicTreeSettings) and isinstance(drafter.policy, FixedSettings):
            place, kind, *_ = models.draft(drafter.draft)
            # One number says how many nodes are expanded and how many children each gets.
            if kind not in _ALGORITHMS or drafter.expand != drafter.children or drafter.least:
                return None
            steps, width = drafter.policy.max_tokens, drafter.children
            grown = width + (steps - 1) * width**2  # it fails where more are to be kept
            nodes = min(drafter.keep, grown) + 1
            return Counterpart(_model(place, _ALGORITHMS[kind], steps, width, nodes))
        if isinstance(drafter, PromptLookupSettings):
            if (matches := self.matches(drafter)) is None:
                return None
            remark = "keeps n-grams of all requests, and runs on CUDA devices only"
            # Of the draft tokens one is the root, the last token of the text.
            return Counterpart(
                {
                    "speculative-algorithm": "NGRAM",
                    "speculative-num-draft-tokens": drafter.max_tokens + 1,
                    **matches,
                    "speculative-ngram-max-bfs-breadth": 1,
                },
                (remark, *self.other_matches(drafter)),
            )
        return None

    def by_load(self, told: dict[str, Any], chain: LengthSettings) -> Counterpart | None:
        """The settings `told` of the longest chain with a length for every load; None where the
        server takes one length only."""
        return None

    def matches(self, drafter: PromptLookupSettings) -> dict[str, int] | None:
        """How long the matches of a lookup are; None where it cannot be told."""
        return {
            "speculative-ngram-min-match-window-size": drafter.min_ngram,
            "speculative-ngram-max-match-window-size": drafter.max_ngram,
        }

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        words = ["python", "-m", "sglang.launch_server", "--model-path", models.target]
        files = {}
        for name, value in counterpart.settings.items():
            if isinstance(value, Mapping):
                files[ADAPTIVE_FILE] = json.dumps(dict(value), indent=1) + "\n"
                value = ADAPTIVE_FILE
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return WrittenFiles(files, shlex.join(words))


class AdaptiveSgLang(SgLang):
    """A later version: EAGLE heads draft by load, and n-grams are kept in a trie."""

    version = "0.5.23"
    known = ("0.5.23",)

    def by_load(self, told: dict[str, Any], chain: LengthSettings) -> Counterpart | None:
        if told["speculative-algorithm"] == "STANDALONE":
            return None
        # Among the candidates of a load it chooses by what was accepted: of one, always that.
        steps = {str(span.low): {"candidate_steps": [span.tokens]} for span in chain.spans}
        return Counterpart(
            {**told, "speculative-adaptive": True, "speculative-adaptive-config": steps},
            ("rounds the load up to a batch size that it has a CUDA graph of",),
        )

    def matches(self, drafter: PromptLookupSettings) -> dict[str, int] | None:
        if drafter.min_ngram > 1:
            return None
        # Of a match and what is copied after it.
        return {"speculative-ngram-max-trie-depth": drafter.max_ngram + drafter.max_tokens}


def _model(place: str, algorithm: str, steps: int, width: int, nodes: int) -> dict[str, Any]:
    """`nodes` counts the root, the last token of the text."""
    return {
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": place,
        "speculative-num-steps": steps,
        "speculative-eagle-topk": width,
        "speculative-num-draft-tokens": nodes,
    }
