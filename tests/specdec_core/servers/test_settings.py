"""Settings of other servers are the keys that these have, and say what was asked for."""

import json
import shlex
from itertools import combinations

import pytest
import yaml

from specdec_core.base.errors import UserError
from specdec_core.config import AnyDrafter, parse
from specdec_core.search.nearest import expressible
from specdec_core.servers.chains import fixed_chain, spans
from specdec_core.servers.server import DraftFile, Models, Server
from specdec_core.servers.table import SERVERS, names_of, server_of

MODELS = Models(
    "org/target",
    {
        "small": DraftFile("org/small", "model"),
        "head": DraftFile("org/head", "eagle3", layers=(1, 2, 5)),
        "first": DraftFile("org/first", "eagle"),
        "tiny": DraftFile("org/tiny", "other"),
        "padded": DraftFile("org/padded", "model", padded=True),
    },
)
CHAIN = {"kind": "draft_model", "draft": "small", "policy": {"kind": "fixed", "max_tokens": 4}}
EAGLE = CHAIN | {"draft": "head"}


def by_load(chain, tokens):
    """A schedule of the chain with these lengths; 0 drafts nothing."""
    lengths = {
        least: chain | {"policy": {"kind": "fixed", "max_tokens": k}} if k else None
        for least, k in tokens.items()
    }
    return {"kind": "schedule", "ranges": lengths}


BY_LOAD = by_load(CHAIN, {1: 5, 4: 5, 8: 2, 16: 0})
LOOKUP = {"kind": "prompt_lookup", "max_ngram": 3, "max_tokens": 8}
TRIGRAM = LOOKUP | {"min_ngram": 3}
SUFFIX = {"kind": "suffix", "max_tokens": 6}
SHARED = SUFFIX | {"memory": "all", "per_match": 0, "min_match": 16}
TREE = EAGLE | {"kind": "dynamic_tree", "expand": 3, "children": 3, "keep": 8}
HYBRID = {"kind": "hybrid", "lookup": SUFFIX, "min_match": 3, "otherwise": EAGLE}
TRIGRAM_ELSE = HYBRID | {"lookup": TRIGRAM, "otherwise": CHAIN}
SVIP = CHAIN | {"policy": {"kind": "svip", "threshold": 0.9}}
HEURISTIC = CHAIN | {"policy": {"kind": "heuristic", "start": 5}}
CONFIDENCE = CHAIN | {"policy": {"kind": "confidence", "threshold": 0.5, "max_tokens": 8}}


def settings(server, drafter):
    asked = None if drafter is None else read(drafter)
    counterpart = SERVERS[server].counterpart(asked, MODELS)
    return None if counterpart is None else dict(counterpart.settings)


def read(drafter):
    return parse(AnyDrafter, drafter, "drafter")


def resting(*drafters):
    """A schedule whose ranges begin at 1, 4, 9 and 12 requests."""
    return {"kind": "schedule", "ranges": dict(zip((1, 4, 9, 12), drafters, strict=False))}


PADDED, EARLIEST = {"draft": "padded"}, {"occurrence": "earliest"}
BY_BATCH = "num_speculative_tokens_per_batch_size"
MOST = "max_concurrency"
CAPTURED = "eagle3_layers_to_capture"
NODES = "speculative-num-draft-tokens"
DEPTH = "suffix_decoding_max_tree_depth"
STEPS = {"1": {"candidate_steps": [5]}, "8": {"candidate_steps": [2]}}


@pytest.mark.parametrize(
    ("server", "drafter", "some"),
    [
        ("vllm", CHAIN, {"method": "draft_model", "model": "org/small"}),
        ("vllm", CHAIN, {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}),
        ("vllm", EAGLE, {"method": "eagle3", "model": "org/head"}),
        ("vllm", BY_LOAD, {BY_BATCH: [[1, 7, 5], [8, 15, 2], [16, 1024, 0]]}),
        # It pairs tokens by their texts for a draft with another number of logits, and draws none.
        ("vllm", CHAIN | PADDED, {"use_heterogeneous_vocab": True, "draft_sample_method": None}),
        ("vllm", LOOKUP, {"prompt_lookup_min": 1, "prompt_lookup_max": 3}),
        ("vllm", SUFFIX, {"suffix_decoding_max_cached_requests": 0}),
        # A match and its draft have 24 tokens together, unless a depth is given.
        ("vllm", SUFFIX | {"max_tokens": 16}, {DEPTH: None}),
        ("vllm", SUFFIX | {"max_tokens": 17}, {DEPTH: 26}),
        ("vllm", SUFFIX | {"max_tokens": 16, "per_match": 1}, {DEPTH: 32}),
        ("vllm", SUFFIX | {"max_tokens": 23, "per_match": 0}, {DEPTH: None}),
        ("vllm", SUFFIX | {"max_tokens": 30, "per_match": 0}, {DEPTH: 31}),
        # It counts the root of what is drafted, and the tokens of a match.
        ("sglang", LOOKUP, {NODES: 9, "speculative-ngram-max-trie-depth": 11}),
        ("sglang", EAGLE, {NODES: 5, "speculative-algorithm": "EAGLE3"}),
        ("sglang", EAGLE | {"draft": "first"}, {"speculative-algorithm": "EAGLE"}),
        ("sglang", TREE, {"speculative-eagle-topk": 3}),
        # 3 nodes grow at first, and 9 on each of three further levels.
        *(("sglang", TREE | {"keep": k}, {NODES: n}) for k, n in ((29, 30), (30, 31), (64, 31))),
        ("trtllm", CHAIN, {"decoding_type": "Draft_Target", MOST: None}),
        ("trtllm", BY_LOAD, {"draft_len_schedule": {7: 5, 15: 2}}),
        ("trtllm", HYBRID, {"sa_config": {"threshold": 3}}),
        ("trtllm", HYBRID | {"lookup": SUFFIX | {"min_match": 5}}, {"sa_config": {"threshold": 5}}),
        ("trtllm", TREE, {"max_total_draft_tokens": 8}),
        # The outputs of the layers before those that the head reads the inputs of.
        *(("trtllm", d, {CAPTURED: [0, 1, 4]}) for d in (EAGLE, TREE, HYBRID)),
        ("trtllm", CHAIN, {CAPTURED: None}),
        ("trtllm", LOOKUP, {"is_use_oldest": False}),
        ("trtllm", LOOKUP | EARLIEST, {"is_use_oldest": True}),
        *(("trtllm", resting(d, d, None, None), {MOST: 8}) for d in (CHAIN, LOOKUP, TREE)),
        ("trtllm", by_load(CHAIN, {1: 4, 9: 0}), {MOST: 8, "max_draft_len": 4}),
        ("llama_cpp", CONFIDENCE, {"spec-draft-p-min": 0.5}),
        ("llama_cpp", CHAIN, {"spec-type": "draft-simple"}),
        ("llama_cpp", CHAIN, {"spec-draft-sampling": "probabilistic"}),
        ("llama_cpp", EAGLE, {"spec-draft-sampling": None}),  # it draws no tokens of heads
        ("llama_cpp", EAGLE, {"spec-type": "draft-eagle3", "spec-draft-model": "org/head"}),
        ("llama_cpp", TRIGRAM, {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 3}),
        ("llama_cpp", TRIGRAM | EARLIEST, {"spec-type": "ngram-map-k"}),
        ("llama_cpp", TRIGRAM | EARLIEST, {"spec-ngram-map-k-size-m": 8}),
        ("llama_cpp", SHARED, {"spec-type": "ngram-mod", "spec-ngram-mod-n-match": 16}),
        # In its list the lookup comes first, wherever it stands.
        ("llama_cpp", TRIGRAM_ELSE, {"spec-type": "ngram-simple,draft-simple"}),
        ("llama_cpp", TRIGRAM_ELSE, {"spec-draft-n-max": 4}),
        ("transformers", CONFIDENCE, {"assistant_confidence_threshold": 0.5}),
        ("transformers", HEURISTIC, {"num_assistant_tokens_schedule": "heuristic_transient"}),
    ],
)
def test_a_drafter_has_these_settings(server, drafter, some):
    found = settings(server, drafter)
    assert {name: found.get(name) for name in some} == some


@pytest.mark.parametrize(
    ("server", "drafter"),
    [
        *((server, SVIP) for server in SERVERS),
        ("vllm", TREE),
        ("vllm", CHAIN | {"draft": "tiny"}),
        ("vllm", EAGLE | {"draft": "first"}),
        ("vllm", SUFFIX | {"min_match": 2}),
        ("sglang", LOOKUP | {"min_ngram": 2}),
        ("sglang", BY_LOAD),  # of heads alone
        ("trtllm", EAGLE | {"draft": "first"}),
        ("trtllm", LOOKUP | {"min_ngram": 2}),
        ("trtllm", SUFFIX | {"min_match": 2}),
        ("trtllm", SUFFIX | {"memory": "all"}),
        ("trtllm", HYBRID | {"lookup": SHARED}),
        ("trtllm", TREE | {"keep": 13}),  # more than 3 · 4
        ("trtllm", TREE | {"keep": 3}),  # fewer than its levels
        ("trtllm", by_load(CHAIN, {1: 2, 4: 5})),  # the first length has to be the longest
        ("trtllm", resting(None, LOOKUP)),
        ("trtllm", resting(LOOKUP, CHAIN, None)),
        ("trtllm", resting(LOOKUP, TREE)),
        ("llama_cpp", EAGLE | {"draft": "first"}),
        ("llama_cpp", SUFFIX),
        ("llama_cpp", TRIGRAM_ELSE | {"min_match": 4}),
    ],
)
def test_a_drafter_has_no_counterpart(server, drafter):
    assert settings(server, drafter) is None


@pytest.mark.parametrize(
    ("server", "drafter", "remark"),
    [
        ("vllm", SUFFIX, "suffix_decoding_min_token_prob"),
        ("vllm", SUFFIX, "longest suffix"),
        ("vllm", CHAIN | PADDED, "numbers of logits"),
        ("trtllm", SUFFIX, "earliest occurrence"),
        ("trtllm", HYBRID, "earliest occurrence"),
        ("llama_cpp", CONFIDENCE, "among the ten likeliest"),
    ],
)
def test_a_remark_names_the_difference(server, drafter, remark):
    remarks = SERVERS[server].counterpart(read(drafter), MODELS).remarks
    assert any(remark in each for each in remarks)


@pytest.mark.parametrize("server", SERVERS)
def test_lookups_are_ranked_by_the_occurrence_after_which_a_server_copies(server):
    """A remark tells where a lookup copies otherwise than a server."""
    alike = {}
    for occurrence in ("latest", "earliest"):
        lookup = read(LOOKUP | {"min_ngram": 3 if server == "llama_cpp" else 1})
        lookup = lookup.model_copy(update={"occurrence": occurrence})
        remarks = SERVERS[server].counterpart(lookup, MODELS).remarks
        alike[occurrence] = not any("occurrence" in remark for remark in remarks)
    own = SERVERS[server].occurrence
    other = server in ("trtllm", "llama_cpp")  # they have a setting for it
    assert alike == {"latest": other or own == "latest", "earliest": other or own == "earliest"}
    ranked = [d for d in expressible(SERVERS[server], MODELS) if d and d.kind == "prompt_lookup"]
    assert {lookup.occurrence for lookup in ranked} == {own}


def test_the_grid_for_vllm_has_each_setting_once():
    """Lookups of all sizes, and suffixes with and without the answers of earlier requests."""
    server = SERVERS["vllm"]
    ranked = [dict(server.counterpart(d, MODELS).settings) for d in expressible(server, MODELS)]
    assert len(ranked) == len({json.dumps(each) for each in ranked})
    lookups, suffixes = (
        [each for each in ranked if each.get("method") == method] for method in ("ngram", "suffix")
    )
    sizes = {(each["prompt_lookup_min"], each["prompt_lookup_max"]) for each in lookups}
    assert {(1, 4), (2, 4), (3, 4), (4, 4)} <= sizes
    assert {each["suffix_decoding_max_spec_factor"] for each in suffixes} == {1, 2, 4}
    assert {each["suffix_decoding_max_cached_requests"] for each in suffixes} == {0, 10_000}


def test_sglang_has_lengths_by_load_of_eagle_heads():
    server = SERVERS["sglang"]
    found = server.counterpart(read(by_load(EAGLE, {1: 5, 4: 5, 8: 2, 16: 0})), MODELS)
    written = server.written(found, MODELS)
    steps = json.loads(written.files["adaptive.json"])
    assert steps == STEPS | {"16": {"candidate_steps": [0]}}
    options = "--speculative-adaptive --speculative-adaptive-config adaptive.json"
    assert options in written.usage
    assert "--speculative-num-steps 5" in written.usage  # has to be one of the file's


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("drafter", [None, CHAIN, EAGLE, BY_LOAD, LOOKUP, SUFFIX, TREE, HYBRID])
def test_what_is_written_names_the_models_and_reads_back(server, drafter):
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


def test_a_schedule_of_chains_with_one_draft_is_a_chain_by_load():
    schedule = {"kind": "schedule", "ranges": {1: CHAIN, 4: None}}
    chain = fixed_chain(read(schedule))
    assert chain.spans == ((1, 3, 4), (4, None, 0))
    mixed = {"kind": "schedule", "ranges": {1: CHAIN, 4: EAGLE}}
    assert fixed_chain(read(mixed)) is None
    assert spans({1: 3, 2: 3, 5: 3}) == ((1, None, 3),)


METHODS = {
    "plug_in": ("check_plug_in", "plugged_in"),
    "bench": ("peers",),
    "serve": ("served",),
    "profile": ("profile",),
}


@pytest.mark.parametrize("server", SERVERS.values(), ids=list(SERVERS))
def test_a_server_declares_the_stages_whose_methods_it_has(server):
    for stage, methods in METHODS.items():
        own = {getattr(type(server), name) is not getattr(Server, name) for name in methods}
        assert own == {stage in server.stages}, stage
    started = bool(server.stages & {"bench", "serve"})
    assert (type(server).modes is not Server.modes) == started


def test_a_servers_stages_and_the_versions_whose_settings_are_known():
    assert names_of("bench") == ("transformers", "vllm")
    assert server_of("vllm", "0.32.1").name == "vllm"


TENSORS, BLOCKS = "draft_tensor_parallel_size", "disable_eagle_block_drop"
ADAPTIVE = "enable_adaptive_verification"


def test_settings_that_no_drafter_decides_are_added_where_vllm_has_them():
    server, more = SERVERS["vllm"], {TENSORS: 1, BLOCKS: True, ADAPTIVE: True}
    head = server.counterpart(read(EAGLE), MODELS)
    told = server.with_more(head, more)
    assert told.settings == {**head.settings, **more}
    assert len(told.remarks) == len(head.remarks) + 3
    with pytest.raises(UserError, match="no further settings of SGLang are known"):
        SERVERS["sglang"].with_more(head, more)


@pytest.mark.parametrize(
    ("drafter", "more", "message"),
    [
        (CHAIN, {BLOCKS: True}, f"--set {BLOCKS}: vLLM has it with eagle3, not draft_model"),
        (LOOKUP, {ADAPTIVE: True}, "draft_model and eagle3, not ngram"),
        (EAGLE, {TENSORS: 0}, f"--set {TENSORS}=0: expected a whole number from 1"),
        (EAGLE, {BLOCKS: 1}, "expected true or false"),
        (EAGLE, {"tensor_parallel_size": 2}, f"expected one of {TENSORS}"),
    ],
)
def test_a_setting_that_vllm_does_not_have_there_is_refused(drafter, more, message):
    server = SERVERS["vllm"]
    with pytest.raises(UserError, match=message):
        server.with_more(server.counterpart(read(drafter), MODELS), more)


def test_the_head_of_a_file_is_converted_by_the_files_folder(monkeypatch):
    """llama.cpp reads the file itself, its script the configuration beside the weights."""
    monkeypatch.setattr("specdec_core.servers.llama_cpp.server.located", {"t.gguf": "there"}.get)
    models, server = Models("t.gguf", MODELS.drafts), SERVERS["llama_cpp"]
    head, start = server.written(server.counterpart(read(EAGLE), models), models).usage.splitlines()
    assert head.endswith('--target-model-dir "$(hf download there)"')
    assert "--model t.gguf" in start


def test_the_grid_for_llama_cpp_has_its_default_lookup_alone_and_before_a_draft():
    server = SERVERS["llama_cpp"]
    ranked = [server.counterpart(each, MODELS).settings for each in expressible(server, MODELS)]
    assert {"ngram-mod", "ngram-mod,draft-simple", "ngram-simple"} <= {
        each.get("spec-type") for each in ranked
    }
    assert all(one != other for one, other in combinations(ranked, 2))


def test_transformers_gets_no_draft_with_another_number_of_logits():
    padded = Models("org/target", {"small": DraftFile("org/small", "model", padded=True)})
    chain = read({"kind": "draft_model"})
    assert SERVERS["transformers"].counterpart(chain, padded) is None


def test_models_in_other_formats_are_converted_before_llama_cpp_starts(monkeypatch, tmp_path):
    """By our module, which knows more tokenizers than llama.cpp's script alone."""
    monkeypatch.setattr("specdec_core.servers.llama_cpp.process.FOLDER", tmp_path)
    server = SERVERS["llama_cpp"]
    written = server.written(server.counterpart(read(EAGLE), MODELS), MODELS)
    target, head, start = written.usage.splitlines()
    convert = "python -m specdec_core.servers.llama_cpp.convert convert_hf_to_gguf.py"
    fetched = '"$(hf download org/target)"'  # the script reads folders
    assert target == f"{convert} {fetched} --outfile target-target.gguf"
    assert head.endswith(f"--outfile draft-head.gguf --target-model-dir {fetched}")
    assert "--model target-target.gguf" in start
    assert "--spec-draft-model draft-head.gguf" in start
    folder = tmp_path / "a model"
    folder.mkdir()
    here = Models(str(folder), {})
    convert_line, _ = server.written(server.counterpart(None, here), here).usage.splitlines()
    assert shlex.split(convert_line)[4:] == [str(folder), "--outfile", "target-a model.gguf"]
    given = Models("/m/target.gguf", {})
    assert server.written(server.counterpart(None, given), given).usage == (
        "llama-server --model /m/target.gguf"
    )
