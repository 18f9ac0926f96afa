"""What no recording tells is decoded once, and then simulated, marked and chosen like the rest."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from dashboards.reports.load_choice import loads
from specdec_core.base.errors import UserError
from specdec_core.cost.forward import ForwardTerms
from specdec_core.cost.steps import StepTimes
from specdec_core.engine import Engine
from specdec_core.engine.scheduler import Limits
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.search.load import decoded
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.choice import choose_for_load
from specdec_core.search.load.decoded import (
    KeptRounds,
    can_simulate,
    recorded_requests,
    with_decoded,
)
from specdec_core.search.load.schedule import drafter_at
from specdec_core.search.load.simulator import shapes_of, simulate_clients
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.workload import Workload
from specdec_core.tokens.statistics import rounds_frame
from tests.live_steps import LiveSteps
from tests.load_timer import ALWAYS_FREE, recorded
from tests.specdec_core.kinds import configured

TREE = {"kind": "dynamic_tree", "policy": {"kind": "fixed", "max_tokens": 6}}
CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 1}}
REPLAYABLE: Mapping[str, dict[str, Any]] = {
    "chain": CHAIN,
    "heuristic": {"kind": "draft_model", "policy": {"kind": "heuristic", "start": 3}},
    "bandit": {"kind": "bandit", "arms": [CHAIN, {"kind": "suffix"}]},
    "hybrid": {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": CHAIN},
}
SLOW_BEYOND_A_FEW = StepTimes(
    target=ForwardTerms(fixed=0.01, per_token_beyond=0.01, knee=26),
    drafts={"draft": ForwardTerms(fixed=0.0001)},
)


@pytest.fixture(scope="module")
def replay(tiny_pair, tmp_path_factory):
    return recorded(tiny_pair, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def decode(replay, tiny_pair):
    engine = Engine(tiny_pair)

    def rounds(configuration):
        engine.configure(configuration)
        return rounds_frame(engine.generate(recorded_requests(replay.recording)))

    return rounds


def simulated(replay, configuration, clients):
    """Every prompt, asked once."""
    answers = replayed_answers(replay, configuration)
    shapes = shapes_of(answers, len(answers))
    return simulate_clients(StepCosts(answers, ALWAYS_FREE), shapes, clients, Limits(4), log=True)


@pytest.mark.parametrize("name", REPLAYABLE)
def test_live_rounds_simulate_as_replayed_ones(name, replay, decode):
    configuration = configured(REPLAYABLE[name])
    assert replay.can(configuration)
    rounds = ReplayedRounds.of_frame(decode(configuration), replay.recording.prompts.ids)
    live = replay.knowing({configuration.id: rounds})
    for clients in (1, 4):
        runs = [simulated(known, configuration, clients) for known in (replay, live)]
        pd.testing.assert_frame_equal(runs[0].records, runs[1].records)
        assert runs[0].log == runs[1].log


def test_a_tree_is_simulated_as_the_engine_decodes_it(replay, decode, tiny_pair):
    tree = configured(TREE)
    known = with_decoded(replay, [tree], decode)
    prompts = enumerate(recorded_requests(replay.recording))
    requests = [replace(request, id=str(n)) for n, request in prompts]
    for clients in (1, 4):
        live = LiveSteps(Engine(tiny_pair, tree, limits=Limits(4)), requests, clients)
        log = simulated(known, tree, clients).log
        assert [step.plan for step in log] == live.plans
        assert [step.candidates for step in log] == live.candidates


def test_what_cannot_be_replayed_competes_and_is_marked(replay, decode):
    tree, chain = configured(TREE), configured(CHAIN)
    known = with_decoded(replay, [tree, chain], decode)
    assert can_simulate(known, tree)
    assert not can_simulate(replay, tree)  # it is unchanged
    workload = Workload(clients=(1, 4), requests=8)
    choice, table = choose_for_load([tree, chain], known, SLOW_BEYOND_A_FEW, workload)
    assert drafter_at(choice.chosen, 1) == tree.drafter
    assert drafter_at(choice.chosen, 4) == chain.drafter
    assert set(choice.decoded) == {tree.id, choice.chosen.id}  # the schedule has the tree
    marked = table.set_index("config_id")["decoded_live"]
    assert set(marked.index[marked]) == set(choice.decoded)
    section = loads(choice)
    assert "† decoded live" in (section.legend or "")
    assert section.shown["configuration"].str.contains("† ★").any()


def test_rounds_are_decoded_once_and_kept_whole(replay, decode, monkeypatch):
    tree = configured(TREE)
    folder = replay.recording.folder / "decoded"
    asked: list[str] = []

    def stopped(configuration):
        raise KeyboardInterrupt

    def noted(configuration):
        asked.append(configuration.id)
        return decode(configuration)

    with pytest.raises(KeyboardInterrupt):
        with_decoded(replay, [tree], KeptRounds(replay.recording, stopped))
    assert not list(folder.glob("*"))
    first = with_decoded(replay, [tree], KeptRounds(replay.recording, noted))
    again = with_decoded(replay, [tree], KeptRounds(replay.recording, stopped))
    assert asked == [tree.id]
    assert first.run(tree).counts == again.run(tree).counts
    assert len(list(folder.iterdir())) == 1
    # A head or state that is trained anew drafts otherwise.
    monkeypatch.setattr(decoded, "trained_digests", lambda _: {"state some": "new"})
    with_decoded(replay, [tree], KeptRounds(replay.recording, noted))
    assert asked == [tree.id] * 2


def test_what_no_rounds_tell_is_refused_as_before(replay, decode):
    pearl = configured({"kind": "pearl"})
    with pytest.raises(UserError, match="depends on time"):
        replayed_answers(with_decoded(replay, [pearl], decode), pearl)
