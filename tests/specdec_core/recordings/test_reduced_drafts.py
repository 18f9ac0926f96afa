"""A draft with a reduced vocabulary is recorded, replayed, and run by PEARL like any other."""

from functools import partial

import pytest

from specdec_core.engine import Engine
from specdec_core.recordings.replay import Replay
from tests.specdec_core.drafting.pearl.in_turns import InTurns
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.models.reduced_draft.drafts import copied_pair, narrowed_pair
from tests.specdec_core.recordings.recorded import SAMPLINGS, assert_replayed, recorded


@pytest.fixture(scope="module", params=["own", "copied"])
def pair(request, tiny_spec, tmp_path_factory):
    if request.param == "own":
        return narrowed_pair(tiny_spec)
    return copied_pair(tiny_spec, tmp_path_factory.mktemp("copied") / "draft")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_its_rounds_are_replayed_as_they_are_decoded(pair, requests, tmp_path, sampling):
    replay = Replay(recorded(pair, requests, tmp_path, sampling=sampling))
    drafters = [chain("svip", threshold=2.0, max_tokens=10)]
    if sampling.greedy:
        drafters.append({"kind": "tree", "branching": [3, 2, 1]})
    for drafter in drafters:
        configuration = configured(drafter, sampling)
        assert_replayed(replay, pair, configuration, requests)
        assert replay.run(configuration).counts.n_accepted > 20  # or nothing was compared


def test_pearl_writes_the_targets_own_tokens(pair, requests):
    pearl = configured({"kind": "pearl", "drafter": chain(max_tokens=4)})
    expected = Engine(pair).generate(requests)
    found = Engine(pair, pearl, 3, open_link=partial(InTurns, pair, 0)).generate(requests)
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    assert sum(r.accepted for g in found for r in g.rounds) > 20
