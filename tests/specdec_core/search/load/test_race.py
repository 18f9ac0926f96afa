"""Contestants answer loads in turns, as long as they may win."""

import pytest

from specdec_core.base.errors import UserError
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


def test_another_one_begins_each_repeat_of_a_load_also_among_those_that_are_left(tmp_path):
    asked, order, heard = [], [], Heard()

    def leaving(load, racing):
        asked.append(load)
        return {"b"} if load == LOADS[1] and len(racing[0].runs["4"]) == 1 else ()

    race = LoadRace(GROUPS, 3, Parts(tmp_path, LoadRecord), heard, leaving)
    a, b, _ = race.run(contestants("abc", order), "three")
    turns = "a1 b1 c1  b4 c4 a4  b1 c1 a1  a4 c4  c1 a1 b1  c4 a4"
    assert order == turns.split()
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
    assert order == ["a1", "a4", "b1", "b4"]
    assert heard.steps == 12


def test_an_interrupted_race_goes_on_with_the_runs_that_are_missing(tmp_path):
    parts, order, again, heard = Parts(tmp_path, LoadRecord), [], [], Heard()
    race = LoadRace(GROUPS, 2, parts, heard)
    with pytest.raises(KeyboardInterrupt):
        race.run(contestants("ab", order, last=3), "")
    first, second = race.run(contestants("ab", again), "")
    assert order + again == ["a1", "b1", "b4", "a4", "b1", "a1", "a4", "b4"]
    assert (heard.done, heard.steps) == (3, 3 + 5)
    assert [run[0].last for run in first.runs["1"]] == [1, 3]
    assert [run[1].last for run in second.runs["1"]] == [2, 2]


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
