"""What a seed writes, token by token: a change of the code must not change a user's samples."""

import json
from dataclasses import replace

import pytest

from specdec_core.config import Configuration, Sampling, parse
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import BLOCK, Limits
from specdec_core.models.cache import PooledCache
from specdec_core.tokens.statistics import Counts
from tests.conftest import save_random_head
from tests.specdec_core.models.eagle.pair_heads import head_of

DRAFTERS = {
    "autoregressive": None,
    "chain": {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 0.7}},
    "tree": {"kind": "tree", "branching": [3, 2, 1]},
    "fork": {"kind": "fork", "width": 2, "policy": {"kind": "fixed", "max_tokens": 3}},
    "dynamic tree": {"kind": "dynamic_tree"},
    "cascade": {"kind": "cascade", "policy": {"kind": "fixed", "max_tokens": 4}},
    "post-use": {"kind": "post_use"},
    "one of the target's": {"kind": "target_tree", "branching": [1, 2, 2]},
    "two of the target's": {"kind": "target_tree", "branching": [2, 2, 1]},
}
SAMPLINGS = {
    "greedy": Sampling(),
    "rejection": Sampling(temperature=0.9, top_k=40),
    "gumbel": Sampling(temperature=0.9, top_k=40, coupling="gumbel"),
}
# Drafters and policies that learn from a request while it is decoded.
LEARNING = {
    "prompt lookup": {"kind": "prompt_lookup"},
    "suffix": {"kind": "suffix"},
    "hybrid": {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": {"kind": "cascade"}},
    "bandit": {"kind": "bandit", "arms": [1, 4, {"kind": "suffix"}], "memory": "request"},
    "schedule": {"kind": "schedule", "ranges": {1: 3, 5: {"kind": "suffix"}}},
    "heuristic": {"kind": "draft_model", "policy": {"kind": "heuristic", "start": 3}},
    "break-even": {"kind": "draft_model", "policy": {"kind": "break_even", "target_cost": 5}},
    "pre-cut": {"kind": "draft_model", "policy": {"kind": "pre_cut", "target_cost": 5}},
}
# The rest of the kinds; a head and an EAGLE head are in the fixtures' folder and pair.
FOLDER, HEAD = "FOLDER", "head"
OTHERS = {
    "token cache": {"kind": "token_cache"},
    "target fork": {"kind": "target_fork", "width": 1},
    "confidence": {"kind": "draft_model", "policy": {"kind": "confidence"}},
    "specdecpp": {
        "kind": "draft_model",
        "policy": {"kind": "specdecpp", "head": f"{FOLDER}/specdecpp", "threshold": 0.6},
    },
    "EAGLE chain": {"kind": "draft_model", "draft": HEAD},
    "EAGLE dynamic tree": {"kind": "dynamic_tree", "draft": HEAD},
}
ALL = {**DRAFTERS, **LEARNING, **OTHERS}
LENGTHS = (9, 17)  # of the prompts

# With any drafter the target's own two sequences, where the output is fixed.
FIXED = {
    "greedy": "53 264 258 134 163 105 258 258 258 258 258 258"
    " | 89 31 211 267 9 249 7 38 68 267 170 313",
    "gumbel": "80 268 285 285 63 182 297 39 312 139 297 201"
    " | 103 67 175 171 319 96 258 217 31 97 308 182",
}
# Else the texts that this drafter's random numbers lead to.
TEXTS = {
    ("rejection", "autoregressive"): "237 268 154 103 183 154 246 141 173 213 300 128"
    " | 59 311 220 95 122 197 197 235 75 31 268 75",
    ("rejection", "chain"): "237 272 111 140 267 126 219 287 125 280 92 296"
    " | 59 311 77 148 228 254 22 254 266 0 217 106",
    ("rejection", "tree"): "237 272 316 102 219 312 285 229 276 280 314 238"
    " | 59 311 96 160 25 217 256 95 110 75 228 264",
    ("rejection", "fork"): "237 272 210 287 148 170 267 84 308 35 228 186"
    " | 59 75 219 283 2 145 97 202 95 103 95 316",
    ("rejection", "dynamic tree"): "237 123 312 103 148 37 166 5 16 285 268 203"
    " | 59 201 220 294 125 5 45 258 77 294 319 268",
    ("rejection", "cascade"): "237 272 126 140 225 87 269 210 316 126 175 12"
    " | 59 311 220 96 160 21 88 300 108 54 153 146",
    ("rejection", "post-use"): "237 272 302 234 124 219 19 246 181 274 89 66"
    " | 59 311 220 96 160 96 303 55 130 11 74 85",
    ("rejection", "one of the target's"): "237 272 316 92 100 125 285 268 134 105 157 192"
    " | 59 75 219 24 21 268 145 153 186 92 219 120",
    ("rejection", "two of the target's"): "237 138 103 316 219 260 181 268 75 229 219 163"
    " | 59 272 210 210 294 163 141 21 296 236 295 215",
    # Choosing among several by what follows them is not lossless.
    ("greedy", "two of the target's"): "214 258 31 302 153 31 214 258 80 259 82 31"
    " | 275 249 318 96 126 126 170 211 96 162 210 186",
    ("gumbel", "two of the target's"): "318 258 225 190 92 186 162 125 96 291 196 237"
    " | 103 67 175 171 319 96 258 217 31 97 308 182",
}
# Forwards of the target and of the draft, candidates, accepted ones, with each of SAMPLINGS.
COUNTS = {
    "autoregressive": ((24, 0, 0, 0), (24, 0, 0, 0), (24, 0, 0, 0)),
    "chain": ((18, 15, 15, 6), (14, 10, 10, 10), (17, 15, 15, 7)),
    "tree": ((13, 25, 120, 11), (13, 29, 141, 11), (13, 28, 135, 11)),
    "fork": ((13, 25, 50, 11), (12, 24, 48, 12), (13, 28, 56, 11)),
    "dynamic tree": ((14, 46, 220, 10), (20, 74, 356, 4), (10, 34, 168, 14)),
    "cascade": ((15, 38, 39, 9), (12, 33, 33, 12), (13, 34, 34, 11)),
    "post-use": ((13, 64, 73, 11), (10, 50, 50, 14), (12, 56, 62, 12)),
    "one of the target's": ((16, 25, 74, 10), (15, 23, 68, 11), (14, 22, 66, 12)),
    "two of the target's": ((15, 22, 88, 11), (12, 16, 64, 14), (12, 18, 72, 14)),
}


@pytest.fixture(scope="module")
def pair(tiny_pair):
    """With an EAGLE head as a further draft."""
    return replace(tiny_pair, drafts={**tiny_pair.drafts, HEAD: head_of(tiny_pair)})


@pytest.fixture(scope="module")
def folder(tiny_pair, tmp_path_factory):
    """Has an acceptance head."""
    folder = tmp_path_factory.mktemp("made")
    save_random_head(tiny_pair, "specdecpp", folder / "specdecpp")
    return folder


def configured(drafter, folder):
    given = json.loads(json.dumps({"drafter": ALL[drafter]}).replace(FOLDER, str(folder)))
    return parse(Configuration, given, "test")


def requests(rule):
    return [
        Request(f"{rule} {n}", tuple(range(5, 5 + length)), 12, SAMPLINGS[rule], n, ignore_eos=True)
        for n, length in enumerate(LENGTHS)
    ]


def expected(rule, drafter):
    text = TEXTS.get((rule, drafter)) or FIXED[rule]
    return [[int(token) for token in own.split()] for own in text.split(" | ")]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", SAMPLINGS)
def test_a_seed_writes_what_it_has_always_written(tiny_pair, rule, drafter):
    configuration = parse(Configuration, {"drafter": DRAFTERS[drafter]}, "test")
    generations = Engine(tiny_pair, configuration, slots=2).generate(requests(rule))
    found = Counts.of(generations)
    assert [g.tokens for g in generations] == expected(rule, drafter)
    counts = (found.n_target, found.n_draft, found.n_drafted, found.n_accepted)
    assert counts == COUNTS[drafter][list(SAMPLINGS).index(rule)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_it_writes_the_same_beside_requests_that_sample_otherwise(tiny_pair, drafter):
    configuration = parse(Configuration, {"drafter": DRAFTERS[drafter]}, "test")
    mixed = [request for rule in SAMPLINGS for request in requests(rule)]
    found = Engine(tiny_pair, configuration, slots=len(mixed)).generate(mixed)
    texts = [text for rule in SAMPLINGS for text in expected(rule, drafter)]
    assert [g.tokens for g in found] == texts


# What decides a round depends on the drafter, and on the rule alone where a chain is verified.
LEARNS_FROM_ALL = ("pre-cut",)  # so that company changes its rounds
CASES = [
    *((name, "gumbel" if name in LEARNS_FROM_ALL else "rejection") for name in ALL),
    *(("chain", "greedy"), ("chain", "gumbel"), ("tree", "greedy"), ("tree", "gumbel")),
]


@pytest.mark.parametrize(("drafter", "rule"), CASES)
def test_preempted_requests_write_what_they_would_have(pair, folder, rule, drafter):
    """Their sequences are prefilled again; random stream, drafter and policy resume unchanged, so
    that every round is the same."""
    configuration = configured(drafter, folder)
    asked = [
        Request(f"{n}", tuple(range(5, 60 - n)), 30, SAMPLINGS[rule], n, ignore_eos=True)
        for n in range(4)
    ]
    alone = [Engine(pair, configuration).generate([request])[0] for request in asked]
    engine = Engine(pair, configuration, limits=Limits(4, step_tokens=40, cache_tokens=512))
    found = engine.generate(asked)
    assert engine.scheduler.preemptions
    assert [g.tokens for g in found] == [g.tokens for g in alone]
    if drafter not in LEARNS_FROM_ALL:
        assert [rounds(g) for g in found] == [rounds(g) for g in alone]


@pytest.mark.parametrize(("drafter", "rule"), CASES)
def test_requests_that_begin_alike_write_what_they_would_have(pair, folder, rule, drafter):
    configuration = configured(drafter, folder)
    engine = Engine(pair, configuration, limits=Limits(3, share_prefixes=True))

    def asked(name, prompt, new_tokens):
        return Request(name, prompt, new_tokens, SAMPLINGS[rule], 7, ignore_eos=True)

    header = tuple(range(5, 50))
    [first] = engine.generate([asked("first", (*header, 9, 8), 12)])
    turn = (*header, 9, 8, *first.tokens, 61, 62)
    requests = [
        asked("next turn", turn, 20),  # is continued in its slot
        asked("other", (*header, 70, 71, 72), 20),  # gets a copy of what is there by then
        asked("unlike", tuple(range(90, 130)), 20),
    ]
    engine.add(requests[0])
    engine.step()
    for request in requests[1:]:
        engine.add(request)
    found = {}
    while not engine.idle:
        for chunk in engine.step():
            if chunk.finished:
                found[chunk.request_id] = chunk.finished
    assert found["next turn"].cached_tokens >= len(turn) - 4
    assert found["other"].cached_tokens == len(header)
    assert found["unlike"].cached_tokens == 0
    assert (engine.prefixes.hits, found["other"].prompt_tokens) == (2, 48)
    for request in requests:
        [alone] = Engine(pair, configuration).generate([request])
        assert found[request.id].tokens == alone.tokens, request.id
        if drafter not in LEARNS_FROM_ALL:
            assert rounds(found[request.id]) == rounds(alone), request.id


@pytest.mark.parametrize("drafter", ALL)
def test_a_cache_in_a_pool_of_blocks_changes_nothing(pair, folder, drafter):
    """With requests that begin alike and preemptions."""
    configuration = configured(drafter, folder)
    header = tuple(range(5, 185))
    asked = [
        Request(f"{n}", (*header[: len(header) - 40 * n], 9 + n, 8), 24, SAMPLINGS["gumbel"], n)
        for n in range(4)
    ]
    found = []
    for pooled in (False, True):
        opened = replace(pair, compact=True, pooled=pooled)
        limits = Limits(3, step_tokens=64, cache_tokens=8 * BLOCK, share_prefixes=True)
        engine = Engine(opened, configuration, limits=limits)
        for runner in (engine.target, *engine.drafts._runners.values()):
            assert isinstance(runner.cache, PooledCache) == pooled
        generations = engine.generate(asked)
        found.append([(g.tokens, g.cached_tokens, rounds(g)) for g in generations])
        assert engine.scheduler.preemptions
        assert engine.prefixes.hits
    assert found[0] == found[1]


def rounds(generation):
    return [
        (r.position, r.drafted, r.accepted, r.generated, r.draft_forwards, r.draft_tokens)
        for r in generation.rounds
    ]
