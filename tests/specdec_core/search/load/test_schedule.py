"""What is chosen for each number of requests is one configuration."""

import pandas as pd
import pytest

from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.search.load.schedule import choose_schedule, drafter_at, scheduled
from tests.specdec_core.kinds import chain, configured

SIX, TWO = configured(chain(max_tokens=6)), configured(chain(max_tokens=2))


def ranges(configuration):
    assert isinstance(configuration.drafter, ScheduleSettings)
    return configuration.drafter.ranges


def test_neighbours_with_one_drafter_are_one_range():
    chosen = scheduled({1: SIX, 2: SIX, 4: TWO, 8: AUTOREGRESSIVE, 16: AUTOREGRESSIVE})
    assert ranges(chosen) == {1: SIX.drafter, 3: TWO.drafter, 5: None}
    drafters = [drafter_at(chosen, n) for n in (1, 2, 3, 4, 5, 99)]
    assert drafters == [SIX.drafter, SIX.drafter, TWO.drafter, TWO.drafter, None, None]


def test_one_configuration_everywhere_is_that_itself():
    assert scheduled({1: SIX, 8: SIX}) == SIX
    assert scheduled({4: AUTOREGRESSIVE}) == AUTOREGRESSIVE


def test_a_schedule_samples_as_its_parts():
    sampling = Sampling(temperature=0.5)
    warm = [each.model_copy(update={"sampling": sampling}) for each in (SIX, AUTOREGRESSIVE)]
    chosen = scheduled({1: warm[0], 2: warm[1]})
    assert chosen.sampling == sampling
    with pytest.raises(ValueError, match="must sample alike"):
        scheduled({1: warm[0], 2: AUTOREGRESSIVE})


def test_a_change_has_to_gain_something():
    rows = [
        (clients, each.id, value)
        for clients, values in {1: (100, 150, 90), 4: (200, 199.5, 201), 8: (300, 200, 250)}.items()
        for each, value in zip((AUTOREGRESSIVE, SIX, TWO), values, strict=True)
    ]
    simulated = pd.DataFrame(rows, columns=["clients", "config_id", "tokens_per_second"])
    known = [AUTOREGRESSIVE, SIX, TWO]
    assert ranges(choose_schedule(simulated, known)) == {1: SIX.drafter, 5: None}
    eager = choose_schedule(simulated, known, tolerance=0)
    assert ranges(eager) == {1: SIX.drafter, 2: TWO.drafter, 5: None}
