"""What a step does: which requests are prefilled, decoded and preempted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specdec_core.engine.scheduler import BLOCK, Limits, Scheduler, StepPlan


def decoded(scheduler, step, left):
    """Every decoding request of the step writes a token, and leaves after its last."""
    scheduler.fed([0] * len(step.decoding))
    for request in list(scheduler.running.values()):
        if request.slot in step.decoding:
            left[request.name] -= 1
            if left[request.name]:
                scheduler.grew(request.name, request.tokens + 1)
            else:
                scheduler.leave(request.name)


def test_a_long_prompt_is_read_in_chunks_beside_those_that_decode():
    scheduler = Scheduler(Limits(2, step_tokens=100))
    scheduler.add("short", 11)
    assert scheduler.plan() == StepPlan([0], {0: 11}, [], {0: "short"})
    scheduler.grew("short", 12)
    scheduler.fed([3])
    scheduler.add("long", 301)
    steps = [scheduler.plan()]
    while 1 not in steps[-1].decoding:
        scheduler.grew("short", scheduler.running["short"].tokens + 1)
        steps.append(scheduler.plan())
    # A step has room for 100 tokens; one request decodes 1 + 3 of them.
    assert [step.reading.get(1) for step in steps] == [96, 96, 96, 13]
    assert all(0 in step.decoding for step in steps)


def test_a_short_prompt_overtakes_a_long_one_which_goes_on():
    scheduler = Scheduler(Limits(3, step_tokens=100))
    scheduler.add("long", 1001)
    scheduler.plan()
    scheduler.add("middle", 401)
    scheduler.add("short", 21)
    assert scheduler.plan() == StepPlan([2], {0: 50, 1: 29, 2: 21}, [], {1: "middle", 2: "short"})


def test_beside_a_prompt_that_ends_others_are_read_whole_or_not_at_all():
    scheduler = Scheduler(Limits(4, step_tokens=100))
    for name, tokens in (("first", 61), ("second", 61), ("short", 11), ("third", 39)):
        scheduler.add(name, tokens)
    step = scheduler.plan()
    assert step.decoding == [0, 2]
    assert step.reading == {0: 61, 2: 11}, "a part would only hold back the first"
    scheduler.leave("first")
    scheduler.leave("short")
    step = scheduler.plan()
    assert (step.decoding, step.reading) == ([1, 3], {1: 61, 3: 39})


def test_a_prompt_is_read_also_where_those_that_decode_fill_a_small_step():
    scheduler = Scheduler(Limits(4, step_tokens=3))
    for name in ("first", "second", "third"):
        scheduler.add(name, 1)
    scheduler.plan()
    scheduler.add("new", 4)
    for tokens in (2, 3, 4):
        for name in ("first", "second", "third"):
            scheduler.grew(name, tokens)
        assert scheduler.plan().reading == {3: 1}


def test_alone_a_prompt_is_read_at_once():
    scheduler = Scheduler(Limits(1))
    scheduler.add("only", 5001)
    assert scheduler.plan() == StepPlan([0], {0: 5001}, [], {0: "only"})


def test_no_request_enters_before_one_that_waits_longer():
    limits = Limits(3, cache_tokens=BLOCK * (Limits(3).blocks_of(400) + 2))
    scheduler = Scheduler(limits)
    for name, tokens in (("first", 400), ("second", 400), ("third", 10)):
        scheduler.add(name, tokens)
    assert list(scheduler.plan().entering.values()) == ["first"]
    assert [request.name for request in scheduler.waiting] == ["second", "third"]
    scheduler.leave("first")
    assert list(scheduler.plan().entering.values()) == ["second", "third"]


def test_each_keeps_room_for_what_a_round_verifies():
    limits = Limits(3, cache_tokens=BLOCK * 6)
    assert [limits.verifying(n).ahead for n in (0, 4, BLOCK, 128)] == [BLOCK, BLOCK, BLOCK, 128]
    assert [limits.verifying(n).most for n in (4, 128)] == [BLOCK * 5, BLOCK * 4]
    entering = []
    for candidates in (4, 128):
        scheduler = Scheduler(limits.verifying(candidates))
        for name in "abc":
            scheduler.add(name, BLOCK)
        entering.append(len(scheduler.plan().entering))
    assert entering == [3, 2]


def test_the_youngest_makes_room_and_is_the_first_to_come_back():
    scheduler = Scheduler(Limits(4, cache_tokens=BLOCK * 6))
    for name in "abc":
        scheduler.add(name, 40)
    assert scheduler.plan().decoding == [0, 1, 2]
    scheduler.add("d", 10)
    for name in "abc":
        scheduler.grew(name, 70)  # three blocks each, where there are six
    step = scheduler.plan()
    assert (step.decoding, step.preempted, step.entering) == ([0, 1], [2], {})
    scheduler.grew("a", 71)
    scheduler.leave("b")
    step = scheduler.plan()
    assert (step.decoding, step.preempted) == ([0], [])
    assert step.reading == {2: 69}, "its last token is read with candidates"
    assert scheduler.running["c"].tokens == 70
    assert step.entering == {}, "there is no room for d"
    scheduler.grew("a", 72)
    step = scheduler.plan()
    assert (step.decoding, step.reading) == ([0, 2], {}), "it has had its first round"
    scheduler.leave("a")
    assert list(scheduler.plan().entering.values()) == ["d"]


REQUESTS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 90)), min_size=1, max_size=9)


@given(REQUESTS, st.integers(1, 4), st.integers(8, 20), st.integers(16, 200))
def test_every_request_finishes_within_the_cache_and_the_budget(sizes, slots, blocks, step_tokens):
    limits = Limits(slots, step_tokens, blocks * BLOCK)
    scheduler, left = Scheduler(limits), Counter()
    for number, (tokens, new) in enumerate(sizes):
        assert limits.holds(tokens + new)
        left[str(number)] = new
        scheduler.add(str(number), tokens)
    steps, firsts = 0, Counter()
    while not scheduler.idle:
        held = {name: request.read for name, request in scheduler.running.items()}
        step = scheduler.plan()
        steps += 1
        assert steps < 5000
        assert step.running, "a step that does nothing"
        assert scheduler.blocks <= blocks
        running = {request.slot: request for request in scheduler.running.values()}
        assert len(running) == len(scheduler.running) <= slots
        read = sum(r.read - held.get(r.name, 0) for r in running.values() if not r.resting)
        if slots > 1:
            assert read <= step_tokens
        ends = {running[slot].name for slot in step.decoding if slot in step.reading}
        assert ends == {running[slot].name for slot in step.decoding} - firsts.keys()
        firsts.update(ends)
        decoded(scheduler, step, left)
    assert not any(left.values())
    assert set(firsts.values()) == {1}, "a prompt is read to its end once"
