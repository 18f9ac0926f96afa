"""A sweep's folder resumes from what it holds only where that is of the same weights."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.heads import SpecDecPlusPlusSettings
from specdec_core.drafting.states import save_state
from specdec_core.drafting.trained import trained_digests
from specdec_core.search.folder import SweepFolder
from tests.conftest import save_random_head
from tests.specdec_core.kinds import configured


def test_results_of_other_weights_are_not_gone_on_with(tmp_path):
    folder, weights = SweepFolder(tmp_path / "sweep"), {"target": "a", "small": "b"}
    assert folder.weights() is None
    for _ in range(2):
        folder.keep_weights(weights)
    for other, named in (({"small": "c"}, "small"), ({"head h": "d"}, "head h")):
        with pytest.raises(UserError, match=f"begun with other weights of {named}; give --fresh"):
            folder.keep_weights(weights | other)
    assert folder.weights() == weights


def test_times_of_two_machines_are_not_mixed(tmp_path):
    folder, machine = SweepFolder(tmp_path / "sweep"), {"cpu": "Xeon × 8", "torch": "2.13.0"}
    for _ in range(2):
        folder.keep_machine(machine)
    moved = r"another machine \(cpu Xeon × 8, not Xeon × 16\); resume it there, or give --fresh"
    with pytest.raises(UserError, match=moved):
        folder.keep_machine(machine | {"cpu": "Xeon × 16"})
    with pytest.raises(UserError, match="gpu none, not H200"):
        folder.keep_machine(machine | {"gpu": "H200"})


def test_a_head_that_was_trained_anew_is_another_one(tiny_pair, tmp_path):
    policy = SpecDecPlusPlusSettings(head=str(tmp_path / "head"))
    asked = [Configuration(drafter=DraftModelSettings(policy=policy)), Configuration()]
    [missing] = trained_digests(asked).values()
    assert missing == ""
    save_random_head(tiny_pair, "specdecpp", tmp_path / "head")
    before = trained_digests(asked)
    assert list(before) == [f"head {tmp_path / 'head'}"]
    assert trained_digests(asked) == before
    save_random_head(tiny_pair, "specdecpp", tmp_path / "head", seed=1)
    assert trained_digests(asked) != before


def test_a_saved_state_that_has_learned_on_is_another_one(tmp_path):
    state = tmp_path / "learned.json"
    arms = {"kind": "bandit", "arms": [1, 4], "state": str(state)}
    asked = [configured(arms)]
    assert trained_digests(asked) == {f"state {state}": ""}
    save_state({"rounds": 1}, state)
    before = trained_digests(asked)
    save_state({"rounds": 2}, state)
    assert trained_digests(asked) != before
