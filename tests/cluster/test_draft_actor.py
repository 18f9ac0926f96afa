"""The draft as an actor on a device of its own: its engine writes what the target would write,
also when the actor is killed, and Ray brings the draft back; and a sweep times it beside others."""

import os
import signal
from threading import Thread

import pytest

from cluster.draft_actor import Draft, PlacedDraft
from cluster.placed_engine import placed_engine
from cluster.placement import Placement, place
from cluster.sweep.run import run_sweep
from specdec_core.base.errors import UserError
from specdec_core.drafting.pearl.socket_link import SocketLink
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.search.plan import Plan
from specdec_core.tokens.statistics import TokenOrigin
from tests.commands import QUICK, prompts_file
from tests.configurations import PEARL, drafting


def test_a_killed_draft_costs_no_token_and_comes_back(ray_running, tiny_pair):
    placed = place(Placement.model_validate({"target": {"devices": 1}}))
    draft = PlacedDraft(placed, tiny_pair.spec)
    try:
        link = draft.wait()
        request = Request("a", tuple(tiny_pair.tokenizer("def main():")["input_ids"]), 240)
        [expected] = Engine(tiny_pair).generate([request])
        engine = Engine(tiny_pair, PEARL, open_link=lambda: link)
        engine.add(request)
        killed, finished = False, None
        assert engine.drafter.prepare(60)
        while finished is None:
            (chunk,) = engine.step()
            finished = chunk.finished
            if TokenOrigin.DRAFT in chunk.origins and not killed:
                os.kill(draft.pid, signal.SIGKILL)
                killed = True
        assert killed
        assert finished.tokens == expected.tokens
        assert TokenOrigin.DRAFT in finished.origins
        assert engine.drafter.prepare(60)  # Ray has brought it back
        [again] = engine.generate([request])
        assert again.tokens == expected.tokens
        assert TokenOrigin.DRAFT in again.origins
        assert link.number == 2
    finally:
        draft.close()
        placed.remove()


def test_a_draft_killed_on_its_device_costs_a_synchronous_drafter_no_token(ray_running, tiny_pair):
    request = Request("a", tuple(tiny_pair.tokenizer("def main():")["input_ids"]), 64)
    [expected] = Engine(tiny_pair).generate([request])
    placement = Placement()
    with placed_engine(tiny_pair.spec, drafting("draft_model"), Limits(1), placement) as engine:
        engine.add(request)
        for _ in range(3):
            [chunk] = engine.step()
        draft, target = engine.pair.draft, engine.pair.group
        assert {TokenOrigin.DRAFT} <= {*chunk.origins}
        assert draft.pid != target.facts[0].pid
        os.kill(draft.pid, signal.SIGKILL)
        origins = []
        while not engine.idle:
            for chunk in engine.step():
                origins += chunk.origins
        assert chunk.finished.tokens == expected.tokens
        assert TokenOrigin.DRAFT in origins
        assert (draft.group.rebuilt, target.rebuilt) == (1, 0)


def test_a_draft_whose_connection_is_cut_comes_back_and_ends_with_its_engine(tiny_pair):
    draft, link = object.__new__(Draft), SocketLink("127.0.0.1")
    draft.drafts = tiny_pair
    address = ("127.0.0.1", link.port, link.key)
    serving = Thread(target=draft.draft_for, args=address, daemon=True)
    serving.start()
    try:
        assert link.wait(30)
        link._lose()  # as an engine does that takes it for lost
        assert link.wait(30)
        assert link.number == 2
    finally:
        link.close()
    serving.join(30)
    assert not serving.is_alive()


CASCADE = {"kind": "cascade"}
SWEEP = QUICK | {
    "max_new_tokens": 16,
    "search": [
        {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 2}}},
        {"drafter": {"kind": "pearl", "drafter": {"kind": "draft_model"}, "wait": [0, None]}},
        {"drafter": {"kind": "hybrid", "otherwise": {"kind": "pearl", "drafter": CASCADE}}},
    ],
}


@pytest.mark.long
def test_a_sweep_times_pearl_on_its_devices(ray_running, tiny_pair, tmp_path):
    prompts = prompts_file(tmp_path, ["def main():"])
    pair, source = tiny_pair.spec.model_dump(), {"source": str(prompts)}
    plan = Plan.model_validate(
        {**SWEEP, "pair": pair, "prompts": source, "cluster": Placement()}
    ).resolve()
    result, _ = run_sweep(plan, tmp_path)
    timed = {result.trial(t.config_id).configuration: t for t in result.timings}
    assert sum(configuration.asynchronous for configuration in timed) == 3
    assert len(timed) == 4
    assert all(timing.differing_outputs == 0 for timing in timed.values())
    assert len(result.trials) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--cluster"),
        ({"cluster": {"draft": {"devices": 0}}}, "a placement that has one for the draft"),
        ({"cluster": Placement(), "method": "optuna", "trials": 3}, "no method optuna"),
    ],
    ids=["no devices", "none for the draft", "optuna"],
)
def test_a_sweep_that_cannot_time_pearl_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Plan.model_validate({**SWEEP, **changes}).resolve()
