"""A schedule changes the drafter with the load, and harms no request's output or drafter."""

from itertools import groupby
from typing import Any

import pytest

from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling, parse
from specdec_core.engine import Engine, Request
from tests.specdec_core.kinds import configured

PARTS: dict[str, Any] = {
    "chain": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 4}},
    "cascade": {"kind": "cascade", "policy": {"kind": "heuristic", "start": 3}},
    "tree": {"kind": "tree", "branching": [3, 2, 1]},
    "post-use": {"kind": "post_use"},
    "suffix": {"kind": "suffix"},
    "fork": {"kind": "fork", "width": 2},
    "merged": {"kind": "hybrid", "otherwise": {"kind": "draft_model"}, "merge": True},
}


def schedule(ranges, **sampling):
    given = {"drafter": {"kind": "schedule", "ranges": ranges}, "sampling": sampling}
    return parse(Configuration, given, "test")


def requests(count, new_tokens=24):
    return [
        Request(str(n), tuple(range(5, 15 + 3 * n)), new_tokens + 8 * n, seed=n, ignore_eos=True)
        for n in range(count)
    ]


def decoded(pair, configuration, slots=3):
    return Engine(pair, configuration, slots).generate(requests(5))


@pytest.mark.parametrize(
    ("part", "coupling"),
    [*(("chain", "none"), ("suffix", "none")), *(("tree", "gumbel"), ("post-use", "gumbel"))],
)
def test_outputs_do_not_depend_on_which_drafter_proposes(tiny_pair, part, coupling):
    """The load falls from three requests to one while they are decoded."""
    sampling = {} if coupling == "none" else {"temperature": 0.8, "coupling": coupling}
    target = AUTOREGRESSIVE.model_copy(update={"sampling": Sampling(**sampling)})
    expected = [g.tokens for g in decoded(tiny_pair, target)]
    found = decoded(
        tiny_pair, schedule({1: PARTS[part], 2: None, 3: {"kind": "suffix"}}, **sampling)
    )
    assert [g.tokens for g in found] == expected
    used = {r.arm for g in found for r in g.rounds}
    assert used == ({0, 1, None} if part != "suffix" else {0, None})


def assert_as_if_new(pair, part, long, found, resumed):
    """`resumed`, the last rounds of `found`, equal the rounds of a new request after its first one.
    Its prompt is the sequence a token before these rounds."""
    before = resumed[0].position - 1
    text = (*long.tokens, *found.tokens[:before])
    again = Request("again", text, long.max_new_tokens - before, seed=1, ignore_eos=True)
    [fresh] = Engine(pair, configured(PARTS[part])).generate([again])
    assert [(r.drafted, r.accepted) for r in resumed] == [
        (r.drafted, r.accepted) for r in fresh.rounds[1:]
    ]


@pytest.mark.parametrize("part", ["cascade", "tree", "suffix"])
def test_a_drafter_that_rested_is_as_good_when_it_resumes(tiny_pair, part):
    """While two requests run, no drafter proposes. It proposes for the one that remains."""
    short, long = requests(2, 12)
    found = Engine(tiny_pair, schedule({1: PARTS[part], 2: None}), 2).generate([short, long])[1]
    rested = [r for r in found.rounds if r.arm is None]
    resumed = [r for r in found.rounds if r.arm is not None]
    assert rested
    assert resumed
    assert_as_if_new(tiny_pair, part, long, found, resumed)


# The other kinds remember what was drafted or accepted before.
@pytest.mark.parametrize("part", ["fork", "suffix", "merged"])
def test_a_drafter_that_rested_in_between_drafts_as_if_it_had_not_drafted_before(tiny_pair, part):
    """Another request comes and leaves: it drafts, rests and drafts again, what it would draft
    after that text anew."""
    short, long = Request("short", (7, 8, 9), 6, ignore_eos=True), requests(1, 48)[0]
    engine = Engine(tiny_pair, schedule({1: PARTS[part], 2: None}), 2)
    engine.add(long)
    for _ in range(6):
        engine.step()
    engine.add(short)
    found = next(c.finished for c in _chunks(engine) if c.request_id == long.id and c.finished)
    arms = [arm for arm, _ in groupby(r.arm for r in found.rounds)]
    assert arms == [None, 0, None, 0], "the first round is nobody's"
    *_, resumed = (list(own) for _, own in groupby(found.rounds, lambda r: r.arm))
    assert_as_if_new(tiny_pair, part, long, found, resumed)


def _chunks(engine):
    while not engine.idle:
        yield from engine.step()


def test_whole_configurations_as_ranges_sample_alike():
    warm = {"drafter": {"kind": "suffix"}, "sampling": {"temperature": 0.7}}
    given = {"drafter": {"kind": "schedule", "ranges": {1: warm, 3: 2}}}
    assert parse(Configuration, given, "test").sampling.temperature == 0.7
