"""Settings of other servers are the keys that these have, and say what was asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from specdec_core.base.errors import UserError
from specdec_core.config import AnyDrafter, DrafterSettings, parse
from specdec_core.search.nearest import expressible
from specdec_core.servers.chains import fixed_chain, spans
from specdec_core.servers.server import DraftFile, Models, Server
from specdec_core.servers.table import SERVERS, names_of, server_of

MODELS = Models(
    "org/target",
    {
        "small": DraftFile("org/small", "model"),
        "head": DraftFile("org/head", "eagle3"),
        "first": DraftFile("org/first", "eagle"),
        "tiny": DraftFile("org/tiny", "other"),
        "padded": DraftFile("org/padded", "model", padded=True),
    },
)
CHAIN = {"kind": "draft_model", "draft": "small", "policy": {"kind": "fixed", "max_tokens": 4}}
EAGLE = CHAIN | {"draft": "head"}
BY_LOAD = CHAIN | {"policy": {"kind": "by_batch", "tokens": {1: 5, 4: 5, 8: 2, 16: 0}}}
RISING = {"kind": "by_batch", "tokens": {1: 2, 4: 5}}
LOOKUP = {"kind": "prompt_lookup", "max_ngram": 3, "max_tokens": 8}
SUFFIX = {"kind": "suffix", "max_tokens": 6}
TREE = {
    "kind": "dynamic_tree",
    "draft": "head",
    "expand": 3,
    "children": 3,
    "keep": 8,
    "policy": {"kind": "fixed", "max_tokens": 4},
}
HYBRID = {"kind": "hybrid", "lookup": SUFFIX, "min_match": 3, "otherwise": EAGLE}
SVIP = CHAIN | {"policy": {"kind": "svip", "threshold": 0.9}}
CONFIDENCE = CHAIN | {"policy": {"kind": "confidence", "threshold": 0.5, "max_tokens": 8}}


def settings(server: str, drafter: dict[str, Any] | None) -> dict[str, Any] | None:
    asked = None if drafter is None else read(drafter)
    counterpart = SERVERS[server].counterpart(asked, MODELS)
    return None if counterpart is None else dict(counterpart.settings)


def read(drafter: dict[str, Any]) -> DrafterSettings:
    return parse(AnyDrafter, drafter, "drafter")


def test_vllm_is_told_of_chains_heads_lookups_and_lengths_by_load() -> None:
    assert settings("vllm", CHAIN) == {
        "method": "draft_model",
        "model": "org/small",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert settings("vllm", EAGLE) == {
        "method": "eagle3",
        "model": "org/head",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert settings("vllm", BY_LOAD)["num_speculative_tokens_per_batch_size"] == [
        [1, 7, 5],
        [8, 15, 2],
        [16, 1024, 0],
    ]
    assert settings("vllm", LOOKUP)["prompt_lookup_max"] == 3
    assert settings("vllm", SUFFIX)["suffix_decoding_max_cached_requests"] == 0
    assert settings("vllm", CHAIN | {"draft": "tiny"}) is None
    assert settings("vllm", TREE) is None


def test_vllm_draws_nothing_from_a_draft_with_another_number_of_logits() -> None:
    """It pairs the tokens by their texts there, and refuses to draw."""
    told = SERVERS["vllm"].counterpart(read(CHAIN | {"draft": "padded"}), MODELS)
    assert told.settings == {
        "method": "draft_model",
        "model": "org/padded",
        "num_speculative_tokens": 4,
        "use_heterogeneous_vocab": True,
    }
    assert "numbers of logits" in told.remarks[0]


def test_sglang_counts_the_root_of_a_lookup_and_the_tokens_of_its_match() -> None:
    told = settings("sglang", LOOKUP)
    assert told["speculative-num-draft-tokens"] == 9
    assert told["speculative-ngram-max-trie-depth"] == 11


@pytest.mark.parametrize(
    ("server", "drafter", "change"),
    [
        ("trtllm", LOOKUP, {"min_ngram": 2}),
        ("trtllm", SUFFIX, {"min_match": 2}),
        ("vllm", SUFFIX, {"min_match": 2}),
        ("trtllm", TREE, {"keep": 13}),  # more than 3 · 4
        ("trtllm", TREE, {"keep": 3}),  # fewer than its levels
        ("trtllm", BY_LOAD, {"policy": RISING}),  # the first length has to be the longest
        ("sglang", LOOKUP, {"min_ngram": 2}),
        ("sglang", EAGLE, {"draft": "small", "policy": BY_LOAD["policy"]}),  # of heads alone
    ],
)
def test_what_a_server_would_do_otherwise_has_no_counterpart(
    server: str, drafter: dict[str, Any], change: dict[str, Any]
) -> None:
    assert settings(server, drafter) is not None
    assert settings(server, drafter | change) is None


def test_vllms_suffixes_are_ranked_with_and_without_earlier_requests() -> None:
    """By default it remembers them, which is faster where answers repeat."""
    ranked = [d for d in expressible(SERVERS["vllm"], MODELS) if d and d.kind == "suffix"]
    told = [SERVERS["vllm"].counterpart(drafter, MODELS) for drafter in ranked]
    kept = {each.settings["suffix_decoding_max_cached_requests"] for each in told if each}
    assert kept == {0, 10_000}


@pytest.mark.parametrize("server", SERVERS)
def test_lookups_are_told_after_which_occurrence_a_server_copies(server: str) -> None:
    """Nothing is said where a server copies as ours does, and all that is ranked does."""
    told = {}
    for occurrence in ("latest", "earliest"):
        lookup = read(LOOKUP | {"min_ngram": 3 if server == "llamacpp" else 1})
        lookup = lookup.model_copy(update={"occurrence": occurrence})
        remarks = SERVERS[server].counterpart(lookup, MODELS).remarks
        told[occurrence] = not any("occurrence" in remark for remark in remarks)
    if server == "trtllm":  # it can be told
        assert told == {"latest": True, "earliest": True}
        assert settings(server, LOOKUP)["is_use_oldest"] is False
        assert settings(server, LOOKUP | {"occurrence": "earliest"})["is_use_oldest"] is True
    else:
        own = "earliest" if server in ("vllm", "transformers") else "latest"
        assert told == {"latest": own == "latest", "earliest": own == "earliest"}
    ranked = [d for d in expressible(SERVERS[server], MODELS) if d and d.kind == "prompt_lookup"]
    assert {lookup.occurrence for lookup in ranked} == {SERVERS[server].occurrence}
    assert all(told[lookup.occurrence] for lookup in ranked)


def test_what_is_ranked_for_vllm_has_the_lengths_of_its_matches() -> None:
    """Among them those of the modes that it is compared with."""
    server = SERVERS["vllm"]
    ranked = [dict(server.counterpart(d, MODELS).settings) for d in expressible(server, MODELS)]
    lookups = {
        (t["prompt_lookup_min"], t["prompt_lookup_max"])
        for t in ranked
        if t.get("method") == "ngram"
    }
    assert {(1, 4), (2, 4), (3, 4), (4, 4)} <= lookups
    factors = {t["suffix_decoding_max_spec_factor"] for t in ranked if t.get("method") == "suffix"}
    assert factors == {1, 2, 4}
    assert len(ranked) == len({json.dumps(told) for told in ranked})


@pytest.mark.parametrize(
    ("suffix", "depth"),
    [
        ({"max_tokens": 16}, None),  # 8 tokens found again allow 16, 24 together
        ({"max_tokens": 17}, 26),
        ({"max_tokens": 16, "per_match": 1}, 32),
        ({"max_tokens": 23, "per_match": 0}, None),
        ({"max_tokens": 30, "per_match": 0}, 31),
    ],
)
def test_vllm_is_told_of_suffixes_and_drafts_that_do_not_fit_otherwise(
    suffix: dict[str, Any], depth: int | None
) -> None:
    assert settings("vllm", SUFFIX | suffix).get("suffix_decoding_max_tree_depth") == depth


def test_what_servers_do_otherwise_with_suffixes_is_said() -> None:
    vllm = SERVERS["vllm"].counterpart(read(SUFFIX), MODELS)
    assert "suffix_decoding_min_token_prob" not in vllm.settings
    assert any("suffix_decoding_min_token_prob" in remark for remark in vllm.remarks)
    assert any("longest suffix" in remark for remark in vllm.remarks)
    for drafter in (SUFFIX, HYBRID):
        remarks = SERVERS["trtllm"].counterpart(read(drafter), MODELS).remarks
        assert any("earliest occurrence" in remark for remark in remarks)


def test_sglang_alone_is_told_of_heads_of_the_first_generations() -> None:
    first = EAGLE | {"draft": "first"}
    assert settings("sglang", first)["speculative-algorithm"] == "EAGLE"
    assert settings("sglang", EAGLE)["speculative-algorithm"] == "EAGLE3"
    assert settings("vllm", first) is None
    assert settings("trtllm", first) is None


def test_sglang_has_lengths_by_load_of_eagle_heads() -> None:
    server = SERVERS["sglang"]
    told = server.counterpart(read(EAGLE | {"policy": BY_LOAD["policy"]}), MODELS)
    written = server.written(told, MODELS)
    assert json.loads(written.files["adaptive.json"]) == {
        "1": {"candidate_steps": [5]},
        "8": {"candidate_steps": [2]},
        "16": {"candidate_steps": [0]},
    }
    options = "--speculative-adaptive --speculative-adaptive-config adaptive.json"
    assert options in written.usage
    assert "--speculative-num-steps 5" in written.usage  # has to be one of the file's


def test_tensorrt_is_told_beyond_which_load_to_rest() -> None:
    """It refuses a schedule beside that."""
    for drafter in (CHAIN, LOOKUP, TREE):
        ranges = {1: drafter, 4: drafter, 9: None, 12: None}
        told = settings("trtllm", {"kind": "schedule", "ranges": ranges})
        assert told == {**settings("trtllm", drafter), "max_concurrency": 8}
    told = settings("trtllm", CHAIN | {"policy": {"kind": "by_batch", "tokens": {1: 4, 9: 0}}})
    assert told == {**settings("trtllm", CHAIN), "max_concurrency": 8}
    by_batch = CHAIN | {"policy": {"kind": "by_batch", "tokens": {1: 4, 3: 2}}}
    assert settings("trtllm", {"kind": "schedule", "ranges": {1: by_batch, 9: None}}) is None
    for ranges in ({1: None, 9: LOOKUP}, {1: LOOKUP, 4: CHAIN, 9: None}, {1: LOOKUP, 4: TREE}):
        assert settings("trtllm", {"kind": "schedule", "ranges": ranges}) is None


def test_the_others_are_told_of_what_they_have() -> None:
    assert settings("sglang", EAGLE)["speculative-num-draft-tokens"] == 5
    assert settings("sglang", TREE)["speculative-eagle-topk"] == 3
    assert settings("trtllm", BY_LOAD)["draft_len_schedule"] == {7: 5, 15: 2}
    assert settings("trtllm", CHAIN)["decoding_type"] == "Draft_Target"
    assert settings("trtllm", HYBRID)["sa_config"] == {"threshold": 3}
    assert settings("trtllm", TREE)["max_total_draft_tokens"] == 8
    assert settings("llamacpp", CONFIDENCE)["spec-draft-p-min"] == 0.5
    assert settings("llamacpp", CHAIN)["spec-type"] == "draft-simple"
    assert settings("llamacpp", EAGLE) is None
    assert settings("transformers", CONFIDENCE)["assistant_confidence_threshold"] == 0.5
    heuristic = CHAIN | {"policy": {"kind": "heuristic", "start": 5}}
    told = settings("transformers", heuristic)
    assert told["num_assistant_tokens_schedule"] == "heuristic_transient"


@pytest.mark.parametrize(("keep", "nodes"), [(29, 30), (30, 31), (31, 31), (64, 31)])
def test_sglang_is_told_to_keep_no_more_nodes_than_grow(keep: int, nodes: int) -> None:
    """3 at first and 9 on each of three further levels, and the root."""
    told = settings("sglang", TREE | {"keep": keep})
    assert told["speculative-num-draft-tokens"] == nodes


@pytest.mark.parametrize("server", SERVERS)
def test_no_server_is_told_of_an_entropy_stop(server: str) -> None:
    assert settings(server, SVIP) is None
    assert settings(server, None) == {}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("drafter", [None, CHAIN, EAGLE, BY_LOAD, LOOKUP, SUFFIX, TREE, HYBRID])
def test_what_is_written_names_the_models_and_reads_back(
    server: str, drafter: dict[str, Any] | None
) -> None:
    told = SERVERS[server].counterpart(None if drafter is None else read(drafter), MODELS)
    if told is None:
        return
    written = SERVERS[server].written(told, MODELS)
    assert "org/target" in written.usage
    assert written.files.keys() <= set(SERVERS[server].files)
    for name, text in written.files.items():
        assert name in written.usage
        assert json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    if drafter and drafter.get("draft"):
        everything = "".join([written.usage, *written.files.values()])
        assert MODELS.draft(drafter["draft"]).place in everything


def test_a_schedule_of_chains_with_one_draft_is_a_chain_by_load() -> None:
    schedule = {"kind": "schedule", "ranges": {1: CHAIN, 4: None}}
    chain = fixed_chain(read(schedule))
    assert chain.spans == ((1, 3, 4), (4, None, 0))
    mixed = {"kind": "schedule", "ranges": {1: CHAIN, 4: EAGLE}}
    assert fixed_chain(read(mixed)) is None
    assert spans({1: 3, 2: 3, 5: 3}) == ((1, None, 3),)


METHODS = {
    "plug_in": ("check_plug_in", "plugged_in"),
    "bench": ("modes", "peers"),
    "serve": ("served",),
    "profile": ("profile",),
}


@pytest.mark.parametrize("server", SERVERS.values(), ids=list(SERVERS))
def test_a_server_declares_the_stages_whose_methods_it_has(server: Server) -> None:
    for stage, methods in METHODS.items():
        own = {getattr(type(server), name) is not getattr(Server, name) for name in methods}
        assert own == {stage in server.stages}, stage


def test_a_stage_refuses_other_servers_in_one_line() -> None:
    assert names_of("bench") == ("transformers", "vllm")
    with pytest.raises(UserError) as refused:
        server_of("llamacpp", stage="serve", option="--peers")
    assert str(refused.value) == (
        "--peers llamacpp: it has no server that this library starts; possible: vllm"
    )


def test_an_unknown_server_or_version_is_refused() -> None:
    with pytest.raises(UserError, match="expected one of vllm"):
        server_of("tgi")
    with pytest.raises(UserError, match=r"of vLLM the settings of 0\.32 are known"):
        server_of("vllm", "0.10")
    assert server_of("vllm", "0.32.1").name == "vllm"
