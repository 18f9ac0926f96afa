"""Contestants answer loads in turns, as long as they may win."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.parts import Parts
from specdec_core.search.load.race import LoadContestant, LoadRace
from specdec_core.search.load.records import LoadRecord
from specdec_core.search.load.workload import Load
from tests.observers import Heard

LOADS = [Load(clients=n, requests=2) for n in (1, 4)]
GROUPS = [[load] for load in LOADS]


def contestants(names, order, last=None):
    """Contestants that put down their name and each load; the `last` turn is interrupted."""

    def answer(name):
        def answered(loads):
            for load in loads:
                if len(order) == last:
                    raise KeyboardInterrupt
                order.append(name + load.key)
                yield load, [LoadRecord(index=n, sent=0, last=len(order)) for n in range(2)]

        return answered

    return [LoadContestant(name, name, answer(name)) for name in names]


def in_turn(names, turn, load):
    return [name + load for name in interleaved(names, turn)]


def test_the_order_is_another_one_in_each_repeat_of_a_load_also_of_those_that_are_left(tmp_path):
    asked, order, heard = [], [], Heard()

    def leaving(load, racing):
        asked.append(load)
        return {"b"} if load == LOADS[1] and len(racing[0].runs["4"]) == 1 else ()

    race = LoadRace(GROUPS, 3, Parts(tmp_path, LoadRecord), heard, leaving)
    a, b, _ = race.run(contestants("abc", order), "three")
    first = [*in_turn("abc", 0, "1"), *in_turn("abc", 1, "4")]
    second = [*in_turn("abc", 1, "1"), *in_turn("ac", 2, "4")]
    assert order == [*first, *second, *in_turn("abc", 2, "1"), *in_turn("ac", 3, "4")]
    assert asked == 2 * LOADS  # before each repeat but the first
    assert (len(a.runs["4"]), len(b.runs["1"]), len(b.runs["4"])) == (3, 3, 1)
    assert (heard.stages, heard.steps) == (["three"], 18)


def test_a_race_is_over_where_all_have_left(tmp_path):
    order, heard = [], Heard()

    def leaving(load, racing):
        return {each.name for each in racing}

    LoadRace([LOADS], 3, Parts(tmp_path, LoadRecord), heard, leaving).run(
        contestants("ab", order), ""
    )
    assert order == [name + load for name in interleaved("ab", 0) for load in "14"]
    assert heard.steps == 12


def test_an_interrupted_race_goes_on_with_the_runs_that_are_missing(tmp_path):
    parts, order, again, heard = Parts(tmp_path, LoadRecord), [], [], Heard()
    race = LoadRace(GROUPS, 2, parts, heard)
    with pytest.raises(KeyboardInterrupt):
        race.run(contestants("ab", order, last=3), "")
    first, second = race.run(contestants("ab", again), "")
    turns = (0, "1"), (1, "4"), (1, "1"), (2, "4")
    assert order + again == [each for turn in turns for each in in_turn("ab", *turn)]
    assert (heard.done, heard.steps) == (3, 3 + 5)
    for each in (first, second):
        name = f"{each.name}1"
        places = [1 + order.index(name), 1 + again.index(name)]
        assert [run[0].last for run in each.runs["1"]] == places


def test_one_that_no_longer_starts_has_failed_under_the_rest_of_the_loads(tmp_path):
    def once(loads):
        if loads == (LOADS[1],):
            raise UserError("no memory")
        yield LOADS[0], [LoadRecord(index=0, sent=0, last=1)]

    heard, other = Heard(), LoadContestant("other", "other", once, needed=False)
    LoadRace(GROUPS, 2, Parts(tmp_path, LoadRecord), heard).run([other], "")
    assert heard.warnings == ["without other: no memory"]
    assert [run[0].error for run in other.runs["4"]] == ["no memory", "no memory"]
    assert [run[0].error for run in other.runs["1"]] == [None, None]
    assert heard.steps == 4
