"""What a seed writes, token by token: a change of the code must not change a user's samples."""

from __future__ import annotations

import pytest

from specdec_core.config import Configuration, Sampling, parse
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts, Generation

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
    "lookahead": {"kind": "lookahead"},
    "ouroboros": {"kind": "ouroboros"},
    "hybrid": {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": {"kind": "cascade"}},
    "bandit": {"kind": "bandit", "arms": [1, 4, {"kind": "suffix"}], "memory": "request"},
    "schedule": {"kind": "schedule", "ranges": {1: 3, 5: {"kind": "suffix"}}},
    "heuristic": {"kind": "draft_model", "policy": {"kind": "heuristic", "start": 3}},
    "dynamic confidence": {"kind": "draft_model", "policy": {"kind": "dynamic_confidence"}},
    "pre-cut": {"kind": "draft_model", "policy": {"kind": "pre_cut"}},
}
LENGTHS = (9, 17)  # of the prompts

# Whoever drafts, the target's own two texts, where the output is fixed.
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
    ("rejection", "chain"): "102 108 95 116 153 122 186 292 182 105 233 130"
    " | 270 170 210 23 126 170 279 302 31 168 95 5",
    ("rejection", "tree"): "272 264 165 42 166 228 43 198 319 315 233 269"
    " | 275 7 258 56 31 260 105 240 145 25 187 314",
    ("rejection", "fork"): "215 120 95 284 284 280 133 186 160 96 291 31"
    " | 275 3 280 317 10 155 74 125 123 249 38 62",
    ("rejection", "dynamic tree"): "153 153 225 261 146 139 126 3 5 290 248 127"
    " | 162 10 155 290 31 315 96 135 103 103 318 264",
    ("rejection", "cascade"): "272 251 89 216 171 54 215 193 92 298 156 115"
    " | 162 123 256 94 315 96 96 141 166 96 214 228",
    ("rejection", "post-use"): "272 239 126 148 10 108 222 153 143 211 304 221"
    " | 162 108 82 155 21 96 168 54 306 314 269 95",
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
# Forwards of the target and of the draft, candidates, accepted ones.
COUNTS = {
    "greedy": {
        "autoregressive": (24, 0, 0, 0),
        "chain": (16, 15, 15, 8),
        "tree": (11, 25, 120, 13),
        "fork": (11, 25, 50, 13),
        "dynamic tree": (12, 46, 220, 12),
        "cascade": (13, 38, 39, 11),
        "post-use": (11, 66, 75, 13),
        "one of the target's": (16, 25, 74, 10),
        "two of the target's": (15, 22, 88, 11),
    },
    "rejection": {
        "autoregressive": (24, 0, 0, 0),
        "chain": (18, 17, 17, 6),
        "tree": (12, 31, 153, 12),
        "fork": (11, 29, 58, 13),
        "dynamic tree": (19, 79, 380, 5),
        "cascade": (14, 46, 46, 10),
        "post-use": (14, 80, 81, 10),
        "one of the target's": (15, 23, 68, 11),
        "two of the target's": (12, 16, 64, 14),
    },
    "gumbel": {
        "autoregressive": (24, 0, 0, 0),
        "chain": (15, 15, 15, 9),
        "tree": (11, 28, 135, 13),
        "fork": (11, 28, 56, 13),
        "dynamic tree": (9, 40, 192, 15),
        "cascade": (12, 38, 38, 12),
        "post-use": (10, 58, 64, 14),
        "one of the target's": (14, 22, 66, 12),
        "two of the target's": (12, 18, 72, 14),
    },
}


def requests(rule: str) -> list[Request]:
    return [
        Request(f"{rule} {n}", tuple(range(5, 5 + length)), 12, SAMPLINGS[rule], n, ignore_eos=True)
        for n, length in enumerate(LENGTHS)
    ]


def expected(rule: str, drafter: str) -> list[list[int]]:
    text = TEXTS.get((rule, drafter)) or FIXED[rule]
    return [[int(token) for token in own.split()] for own in text.split(" | ")]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", SAMPLINGS)
def test_a_seed_writes_what_it_has_always_written(tiny_pair: Pair, rule: str, drafter: str) -> None:
    configuration = parse(Configuration, {"drafter": DRAFTERS[drafter]}, "test")
    generations = Engine(tiny_pair, configuration, slots=2).generate(requests(rule))
    counts = Counts.of(generations)
    assert [g.tokens for g in generations] == expected(rule, drafter)
    assert COUNTS[rule][drafter] == (
        counts.n_target,
        counts.n_draft,
        counts.n_drafted,
        counts.n_accepted,
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_it_writes_the_same_beside_requests_that_sample_otherwise(
    tiny_pair: Pair, drafter: str
) -> None:
    configuration = parse(Configuration, {"drafter": DRAFTERS[drafter]}, "test")
    mixed = [request for rule in SAMPLINGS for request in requests(rule)]
    found = Engine(tiny_pair, configuration, slots=len(mixed)).generate(mixed)
    texts = [text for rule in SAMPLINGS for text in expected(rule, drafter)]
    assert [g.tokens for g in found] == texts


@pytest.mark.parametrize("rule", SAMPLINGS)
@pytest.mark.parametrize("drafter", [*DRAFTERS, *LEARNING])
def test_preempted_requests_write_what_they_would_have(
    tiny_pair: Pair, rule: str, drafter: str
) -> None:
    """Their texts are read again; random stream, drafter and policy go on as if nothing had been:
    every round is the same."""
    configuration = parse(Configuration, {"drafter": {**DRAFTERS, **LEARNING}[drafter]}, "test")
    asked = [
        Request(f"{n}", tuple(range(5, 60 - n)), 30, SAMPLINGS[rule], n, ignore_eos=True)
        for n in range(4)
    ]
    alone = [Engine(tiny_pair, configuration).generate([request])[0] for request in asked]
    engine = Engine(tiny_pair, configuration, limits=Limits(4, step_tokens=40, cache_tokens=512))
    found = engine.generate(asked)
    assert engine.scheduler.preemptions
    learns_from_all = drafter in ("ouroboros", "pre-cut")  # so that company changes its rounds
    if rule != "rejection" or not learns_from_all:
        assert [g.tokens for g in found] == [g.tokens for g in alone]
    if not learns_from_all:
        assert [rounds(g) for g in found] == [rounds(g) for g in alone]


@pytest.mark.parametrize("rule", SAMPLINGS)
@pytest.mark.parametrize("drafter", [*DRAFTERS, *LEARNING])
def test_requests_that_begin_alike_write_what_they_would_have(
    tiny_pair: Pair, rule: str, drafter: str
) -> None:
    configuration = parse(Configuration, {"drafter": {**DRAFTERS, **LEARNING}[drafter]}, "test")
    engine = Engine(tiny_pair, configuration, limits=Limits(3, share_prefixes=True))

    def asked(name: str, prompt: tuple[int, ...], new_tokens: int) -> Request:
        return Request(name, prompt, new_tokens, SAMPLINGS[rule], 7, ignore_eos=True)

    header = tuple(range(5, 50))
    [first] = engine.generate([asked("first", (*header, 9, 8), 12)])
    turn = (*header, 9, 8, *first.tokens, 61, 62)
    requests = [
        asked("next turn", turn, 20),  # goes on in its slot
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
    learns_from_all = drafter in ("ouroboros", "pre-cut")
    for request in requests:
        [alone] = Engine(tiny_pair, configuration).generate([request])
        if rule != "rejection" or not learns_from_all:
            assert found[request.id].tokens == alone.tokens, request.id
        if not learns_from_all:
            assert rounds(found[request.id]) == rounds(alone), request.id


def rounds(generation: Generation) -> list[tuple[int, ...]]:
    return [
        (r.position, r.drafted, r.accepted, r.generated, r.draft_forwards, r.draft_tokens)
        for r in generation.rounds
    ]
