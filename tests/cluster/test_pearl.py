"""The draft as an actor on a device of its own: its engine writes what the target would write,
also when the actor is killed, and Ray brings the draft back."""

import os
import signal

from cluster.pearl import PlacedDraft
from cluster.placement import Placement, place
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.pair import Pair
from specdec_core.stats import Origin

PEARL = Configuration.model_validate({"drafter": {"kind": "pearl", "window": 4, "wait": 2}})


def test_a_killed_draft_costs_no_token_and_comes_back(ray_running: None, tiny_pair: Pair) -> None:
    placed = place(Placement.model_validate({"target": {"devices": 1}}))
    draft = PlacedDraft(placed, tiny_pair.spec)
    try:
        link = draft.wait()
        request = Request("a", tuple(tiny_pair.tokenizer("def main():")["input_ids"]), 240)
        [expected] = Engine(tiny_pair).generate([request])
        engine = Engine(tiny_pair, PEARL, open_link=lambda: link)
        engine.add(request)
        rounds, finished = 0, None
        while finished is None:
            (chunk,) = engine.step()
            finished, rounds = chunk.finished, rounds + 1
            if rounds == 5:
                os.kill(draft.pid, signal.SIGKILL)
        assert finished.tokens == expected.tokens
        assert Origin.DRAFT in finished.origins
        assert link.wait(60)
        again = engine.generate([request])
        assert link.number == 2
        assert [g.tokens for g in again] == [expected.tokens]
        assert again[0].origins.count(Origin.DRAFT) > 100
    finally:
        draft.close()
        placed.remove()
