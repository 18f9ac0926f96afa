"""What a sweep of a server compares, and what it is started with after the race."""

from types import SimpleNamespace

import pandas as pd
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.evidence.server_choice import (
    after_first_runs,
    best_at,
    best_of_all,
    by_load,
    contenders,
    express,
    joined,
)
from specdec_core.measure.comparison import FOLDS, folds
from specdec_core.search.load.workload import LiveSettings, Load
from specdec_core.servers.server import DraftFile, Mode, Models
from specdec_core.servers.table import SERVERS
from tests.load_result import REQUESTS, load_row, records
from tests.own_server import OwnServer
from tests.specdec_core.kinds import chain, configured

MODELS = Models("org/target", {"small": DraftFile("org/small", "model")})
LOADS = [Load(clients=n, requests=REQUESTS) for n in (1, 4)]
SERVER = OwnServer()


def small(tokens):
    return configured(chain(max_tokens=tokens) | {"draft": "small"})


def row(name, alone, together):
    """A row that takes so many seconds a token with 1 and with 4 clients."""
    found = load_row(name, "own", 0.1, 0.01, autoregressive=name == "plain")
    for clients, seconds in ((1, alone), (4, together)):
        found.runs[str(clients)] = [records(seconds, seconds, clients) for _ in range(2)]
    return found


PLAIN = row("plain", 0.10, 0.20)
LONG, SHORT = row("long", 0.05, 0.25), row("short", 0.07, 0.18)


def test_configurations_become_modes_once_and_the_rest_is_named():
    lookup = {"kind": "prompt_lookup", "min_ngram": 2}
    asked = [
        small(3),
        small(3),
        configured(lookup),
        configured(lookup | {"occurrence": "earliest"}),
        configured({"kind": "suffix"}),
        AUTOREGRESSIVE,
    ]
    found = express(SERVER, MODELS, asked)
    assert [mode.settings["kind"] for mode in found.modes.values()] == [
        "draft_model",
        "prompt_lookup",
    ]
    assert [each.label for each in found.left_out] == ["suffix"]
    assert all(mode.with_ours and mode.configuration for mode in found.modes.values())
    modes = list(found.modes.values())
    assert joined(modes[:1], modes) == modes
    plugged = [SERVER.plug_in_mode(small(tokens), f"K={tokens}") for tokens in (2, 3, 2)]
    assert joined(modes, plugged) == [*modes, *plugged[:2]]


def test_a_draft_that_the_server_cannot_load_is_named_with_the_reason():
    drafts = {"head": DraftFile("org/head", "other", refused="org/head: no place for it")}
    asked = [configured(chain(max_tokens=k) | {"draft": "head"}) for k in (2, 3)]
    found = express(SERVERS["trtllm"], Models("org/target", drafts), asked)
    assert (found.modes, found.left_out) == ({}, asked)
    assert found.missing == ["draft head: org/head: no place for it"]


def test_a_server_with_settings_for_both_occurrences_keeps_them(monkeypatch):
    monkeypatch.setattr(OwnServer, "both_occurrences", True)
    lookup = {"kind": "prompt_lookup", "min_ngram": 2}
    asked = [configured(lookup | {"occurrence": each}) for each in ("latest", "earliest")]
    assert len(express(SERVER, MODELS, asked).modes) == 2


def test_of_the_servers_own_modes_the_fastest_in_the_first_runs_is_raced():
    plain, *own = [Mode("plain", {}), Mode("draft", {"k": 3}), Mode("n-gram", {"k": 4})]
    ours = [Mode("long", {"k": 6}), Mode("short", {"k": 2}), Mode("new", {"k": 1})]

    def raced(**seconds):
        rows = [row(name, *each) for name, each in seconds.items()]
        modes = [plain, *own, *ours[:2]]
        found = after_first_runs(modes, [plain, *own], rows, LOADS, ours[1:])
        return [mode.name for mode in found]

    ran = {"plain": (0.1, 0.1), "draft": (0.12, 0.12), "n-gram": (0.11, 0.12)}
    ran |= {"long": (0.1, 0.1), "short": (0.1, 0.1)}
    assert raced(**ran) == ["plain", "n-gram", "short", "new"]
    assert raced(**ran | {"draft": (0.01, 0.5)})[1] == "draft"  # over both loads
    # Without a row, one did not start; it is not started again.
    del ran["short"], ran["n-gram"]
    assert raced(**ran) == ["plain", "draft", "new"]
    del ran["draft"]
    assert raced(**ran) == ["plain", "new"]


def test_contenders_are_the_best_over_all_loads_that_lose_nothing_to_no_speculation():
    lookup = configured({"kind": "prompt_lookup"})
    given = {
        AUTOREGRESSIVE: (40, 100),
        small(6): (99, 89),  # the best with one client, too slow with four
        small(2): (60, 120),
        small(3): (61, 121),
        lookup: (58, 119),
        small(1): (41, 101),  # far from the best
    }
    known = {each.id: each for each in given}
    modes = {key: Mode(each.label, {}) for key, each in known.items()}
    simulated = SimpleNamespace(
        traffic=SimpleNamespace(loads=LOADS),
        known=known,
        baseline=AUTOREGRESSIVE,
        values=lambda load: pd.Series(
            {each.id: speeds[LOADS.index(load)] for each, speeds in given.items()}
        ),
    )

    def found(**live):
        return [mode.name for mode in contenders(simulated, modes, LiveSettings(**live))]

    assert found(finalists=1) == [small(3).label, lookup.label]  # one of each family first
    assert found(finalists=5) == [small(3).label, lookup.label, small(2).label]
    for each in given:
        given[each] = (100, 50) if each.drafter else (100, 100)
    assert found() == []


def test_what_ran_and_is_best_at_each_load_is_joined_in_a_table_of_lengths():
    given = {AUTOREGRESSIVE: (1, 1), small(6): (5, 1), small(2): (2, 4), small(3): (9, 9)}
    known = {each.id: each for each in given}
    modes = {key: Mode(each.label, {}) for key, each in known.items() if each.drafter}
    table = pd.DataFrame(
        {"clients": n, "config_id": each.id, "tokens_per_second": speeds[turn]}
        for each, speeds in given.items()
        for turn, n in enumerate((1, 4))
    )
    simulated = SimpleNamespace(known=known, baseline=AUTOREGRESSIVE, table=table)

    def found(*ran):
        rows = [row(each.label, 1, 1) for each in ran]
        return by_load(SERVER, MODELS, simulated, modes, rows)

    joint = found(small(6), small(2))
    drafter = joint.configuration.drafter
    assert [drafter.at(n) for n in (1, 2, 4, 9)] == [small(k).drafter for k in (6, 2, 2, 2)]
    [planned] = express(SERVER, MODELS, [joint.configuration]).modes.values()
    assert planned.name == joint.configuration.label != joint.name
    assert found(small(2)) is None


def test_what_loses_to_no_speculation_at_a_load_is_no_champion():
    assert best_of_all([PLAIN, LONG, SHORT], LOADS) is SHORT
    assert best_of_all([PLAIN, LONG], LOADS) is PLAIN


def test_what_loses_to_the_servers_own_best_mode_at_a_load_is_no_champion():
    default = row("default", 0.08, 0.10)

    def ours(alone, together):
        return row("ours", alone, together).model_copy(update={"with_ours": True})

    # 8 times and 1.9 times as fast as no speculation, but slower than the default at a load.
    assert best_of_all([PLAIN, default, ours(0.0125, 0.107)], LOADS) is default
    within = ours(0.0125, 0.104)
    assert best_of_all([PLAIN, default, within], LOADS) is within
    # It is compared with the best own mode that may win itself.
    assert best_of_all([PLAIN, row("default", 0.01, 0.22), near := ours(0.05, 0.1)], LOADS) is near


def test_the_champion_is_chosen_on_all_requests_or_without_a_part_of_them():
    """A row that is slow on the requests of one part only, and so slow that it loses by them."""
    unlucky, part = row("unlucky", 0.07, 0.14), 4
    for load, runs in unlucky.runs.items():
        for run, plain in zip(runs, PLAIN.runs[load], strict=True):
            for n in folds(REQUESTS)[part].time:
                run[n].last = run[n].begun + 5 * (plain[n].last - plain[n].begun)
    assert best_of_all([PLAIN, unlucky], LOADS) is PLAIN
    for without in range(FOLDS):
        expected = unlucky if without == part else PLAIN
        assert best_of_all([PLAIN, unlucky], LOADS, without) is expected


def test_the_best_at_a_load_is_found_in_the_runs_that_both_had():
    """While the machine becomes slower, the slower row leaves the race: its own runs were fast."""
    plain, left = PLAIN.model_copy(deep=True), row("left", 0.0, 0.0)
    for load, [first, *_] in PLAIN.runs.items():
        plain.runs[load] = [lasting(first, factor) for factor in (1, 1.5, 2)]
        left.runs[load] = [lasting(first, factor) for factor in (1.1, 1.6)]
    assert [best_at([plain, left], load) for load in LOADS] == [plain, plain]


def lasting(run, factor):
    """A run of which every answer took `factor` times as long."""
    return [
        each.model_copy(
            update={
                "first": each.sent + factor * (each.first - each.sent),
                "last": each.sent + factor * (each.last - each.sent),
            }
        )
        for each in run
    ]


def test_nothing_is_compared_with_what_failed():
    failed = PLAIN.model_copy(deep=True)
    failed.runs["4"][0][3].error = "the answer broke off"
    with pytest.raises(UserError, match="plain: requests failed with 4 clients, so nothing can be"):
        best_of_all([failed, SHORT], LOADS)


@pytest.mark.parametrize("load", ["1", "4"])
def test_what_failed_a_request_is_no_champion(load):
    failed = SHORT.model_copy(deep=True)
    failed.runs[load][0][3].error = "the answer broke off"
    assert best_of_all([PLAIN, failed], LOADS) is PLAIN
    at = next(each for each in LOADS if each.key == load)
    assert best_at([PLAIN, failed], at) is PLAIN
