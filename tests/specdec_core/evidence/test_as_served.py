"""First runs of a server's settings correct the simulation of all of them."""

from types import SimpleNamespace

import pytest

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.cost import draft_key
from specdec_core.evidence.as_served import as_served
from specdec_core.search.load.simulated import Simulated
from specdec_core.search.load.workload import Workload
from specdec_core.servers.server import Mode
from tests.load_result import load_row, records
from tests.specdec_core.cost.examples import fitted_profile
from tests.specdec_core.kinds import chain, configured

LONG, SHORT = (configured(chain(max_tokens=tokens)) for tokens in (6, 2))
PLUGGED, LOOKUP = configured(chain("svip", threshold=1.0)), configured({"kind": "prompt_lookup"})
ALL = (LONG, SHORT, LOOKUP, PLUGGED)
WORKLOAD = Workload(clients=(1, 4), requests=4)
PROFILE = fitted_profile(round_overhead=0.001)


@pytest.mark.parametrize("where", ["every round", "rounds of the draft"])
def test_other_settings_of_a_family_take_as_long_as_its_first_runs_show(replay, where):
    """A server that takes 8 ms longer for a round, or for a round that drafts with the model."""
    longer = {"round_overhead": 0.009}
    if where == "rounds of the draft":
        longer = {"proposals": {draft_key("draft"): 0.008}}
    server = PROFILE.model_copy(update=longer)
    simulated, truth = (Simulated(ALL, replay, p, WORKLOAD, Observer()) for p in (PROFILE, server))
    modes = {c.id: Mode(c.label, {"K": n}, configuration=c) for n, c in enumerate(ALL)}
    modes[AUTOREGRESSIVE.id] = Mode("plain", {}, configuration=AUTOREGRESSIVE)
    modes[PLUGGED.id] = Mode(
        PLUGGED.label, {"K": 9}, configuration=PLUGGED, plug_in=PLUGGED, with_ours=True
    )
    rows = []
    for each in (AUTOREGRESSIVE, SHORT):
        row = load_row(modes[each.id].name, "own", 0.1, 0.01)
        for load in WORKLOAD.clients:
            [at] = [each for each in truth.traffic.loads if each.clients == load]
            made = records(0.1, 0.1, load)
            row.runs[at.key] = [made]
            scale = row.tokens_per_second(at) / truth.values(at)[each.id]
            row.runs[at.key] = [records(0.1 * scale, 0.1 * scale, load)]
        rows.append(row)
    first = SimpleNamespace(rows=rows, loads=list(truth.traffic.loads))
    found = as_served(simulated, first, modes)
    for load in truth.traffic.loads:
        expected, corrected = truth.values(load), found.values(load)
        for each in (AUTOREGRESSIVE, SHORT, LONG, LOOKUP):
            assert corrected[each.id] == pytest.approx(expected[each.id], rel=0.01), each.label
        # A plug-in without a first run takes longer by what decoding without drafting does.
        if where == "every round":
            assert corrected[PLUGGED.id] == pytest.approx(expected[PLUGGED.id], rel=0.01)
        else:
            before = simulated.values(load)[PLUGGED.id]
            assert corrected[PLUGGED.id] == pytest.approx(before, rel=0.01)
    # What was simulated stays in the table.
    before = simulated.table.set_index(["load", "config_id"])["tokens_per_second"]
    kept = found.table.set_index(["load", "config_id"])["simulated_tokens_per_second"]
    assert (kept == before[kept.index]).all()


def test_a_failed_first_run_corrects_nothing(replay):
    simulated = Simulated(ALL, replay, PROFILE, WORKLOAD, Observer())
    modes = {SHORT.id: Mode(SHORT.label, {"K": 2}, configuration=SHORT)}
    row = load_row(SHORT.label, "own", 9.0, 9.0)
    for runs in row.runs.values():
        runs[0][0].error = "the answer broke off"
    first = SimpleNamespace(rows=[row], loads=list(simulated.traffic.loads))
    found = as_served(simulated, first, modes)
    for load in simulated.traffic.loads:
        expected = simulated.values(load)[found.values(load).index]
        assert list(found.values(load)) == pytest.approx(list(expected))
