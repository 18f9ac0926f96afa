"""SGLang: command-line options."""

from __future__ import annotations

import shlex

from specdec_core.config import DrafterSettings
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.export.server import Counterpart, Models, Server, Written, fixed_chain

_ALGORITHMS = {"model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


class SgLang(Server):
    name = "sglang"
    title = "SGLang"
    version = "0.5.9"
    known = ("0.5.9",)
    heads = "specforge"

    def counterpart(self, drafter: DrafterSettings | None, models: Models) -> Counterpart | None:
        if drafter is None:
            return Counterpart({})
        if (chain := fixed_chain(drafter)) is not None:
            place, kind, *_ = models.draft(chain.draft)
            if kind not in _ALGORITHMS or chain.scheduled:
                return None
            return Counterpart(_model(place, _ALGORITHMS[kind], chain.most, 1, chain.most + 1))
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
            remark = "keeps n-grams of all requests, and runs on CUDA devices only"
            # Of the draft tokens one is the root, the last token of the text.
            return Counterpart(
                {
                    "speculative-algorithm": "NGRAM",
                    "speculative-num-draft-tokens": drafter.max_tokens + 1,
                    "speculative-ngram-min-match-window-size": drafter.min_ngram,
                    "speculative-ngram-max-match-window-size": drafter.max_ngram,
                    "speculative-ngram-max-bfs-breadth": 1,
                },
                (remark, *self.other_matches(drafter)),
            )
        return None

    def written(self, counterpart: Counterpart, models: Models) -> Written:
        words = ["python", "-m", "sglang.launch_server", "--model-path", models.target]
        for name, value in counterpart.settings.items():
            words += [f"--{name}", str(value)]
        return Written({}, shlex.join(words))


def _model(place: str, algorithm: str, steps: int, width: int, nodes: int) -> dict[str, object]:
    """`nodes` counts the root, the last token of the text."""
    return {
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": place,
        "speculative-num-steps": steps,
        "speculative-eagle-topk": width,
        "speculative-num-draft-tokens": nodes,
    }
