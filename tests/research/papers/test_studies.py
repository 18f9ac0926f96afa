"""A study's table is kept as soon as it is there, and computed again only for other inputs."""

import pandas as pd
import pytest

from research.papers.studies import Input, Study, study_tables
from specdec_core.base.errors import UserError
from tests.observers import Heard


class Counted:
    """Doubles its input; says how often it was asked, and fails for 13."""

    def __init__(self):
        self.asked: list[int] = []

    def __call__(self, number):
        if number == 13:
            raise KeyboardInterrupt
        self.asked.append(number)
        return pd.DataFrame({"twice": [2 * number]})


def inputs(**numbers):
    return {name: Input(f"is {n}", lambda n=n: n) for name, n in numbers.items()}


def test_a_table_is_computed_once_for_the_same_inputs(tmp_path):
    measure = Counted()
    study = Study("double", ("a",), measure)
    first = study_tables([study], inputs(a=3), tmp_path)["double"]
    assert list(first["twice"]) == [6]
    pd.testing.assert_frame_equal(study_tables([study], inputs(a=3), tmp_path)["double"], first)
    assert measure.asked == [3]
    assert list(study_tables([study], inputs(a=4), tmp_path)["double"]["twice"]) == [8]
    study_tables([study], inputs(a=3), tmp_path, fresh=True)
    study_tables([Study("double", ("a",), measure, version=2)], inputs(a=3), tmp_path)
    assert measure.asked == [3, 4, 3, 3]


def test_an_interrupted_run_keeps_the_tables_that_it_has(tmp_path):
    measure = Counted()
    studies = [Study("first", ("a",), measure), Study("second", ("b",), measure)]
    with pytest.raises(KeyboardInterrupt):
        study_tables(studies, inputs(a=3, b=13), tmp_path)
    [kept] = tmp_path.iterdir()
    assert kept.name.startswith("first-")
    tables = study_tables(studies, inputs(a=3, b=5), tmp_path)
    assert [*tables] == ["first", "second"]
    assert measure.asked == [3, 5]


def test_each_table_is_a_stage_after_those_of_its_inputs(tmp_path):
    watching = Heard()

    def make():
        watching.stage("making a", 6)
        return 3

    studies = [Study("double", ("a",), Counted()), Study("again", ("b",), Counted())]
    given = {"a": Input("3", make)} | inputs(b=4)
    for _ in range(2):  # what there is already is no stage
        study_tables(studies, given, tmp_path, observer=watching)
    assert watching.stages == ["making a", "computing double", "computing again"]


def too_few(number):
    raise UserError(f"{number} prompts are too few")


@pytest.mark.parametrize(
    ("needs", "measure", "reason"),
    [
        (("a",), lambda number: pd.DataFrame(), "its inputs are too small"),
        (("a", "long"), Counted(), "no long"),
        (("a",), too_few, "1 prompts are too few"),
    ],
)
def test_what_cannot_be_computed_is_left_out_with_a_warning(needs, measure, reason, tmp_path):
    watching = Heard()
    studies = [Study("one", needs, measure), Study("double", ("a",), Counted())]
    for _ in range(2):
        assert [*study_tables(studies, inputs(a=1), tmp_path, observer=watching)] == ["double"]
    assert watching.warnings == [f"one is left out: {reason}"] * 2
